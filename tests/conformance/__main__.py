"""python tests/conformance http://ADDRESS:8001   checks an engine against the contract
python tests/conformance fake                 plays the engines of every pod, with KUBECONFIG
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import check


def main() -> int:
    if len(sys.argv) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    if sys.argv[1] != "fake":
        return check.main(sys.argv[1])
    sys.path.append(str(Path(__file__).parents[1] / "cluster"))
    from api import Api
    from fake import Fake

    Fake(Api()).run()
    return 0


if __name__ == "__main__":
    sys.exit(main())

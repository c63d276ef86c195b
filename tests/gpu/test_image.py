"""Nothing that server/cuda.Dockerfile takes out of torch is missed on a GPU: its own lines are
applied to hard links of this machine's packages, and tests of the engine and of what several GPUs
exchange run with those."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("torch", "torchgen", "functorch", "nvidia")
TAKEN_OUT = re.compile(
    r"cd \$\{SITE\} && (rm -rf .+?) && \\\n    rm -rf /opt/kvline/bin/ninja", re.S
)
WORK = """
import torch
print(torch.__file__)
a = torch.randn(512, 512, device="cuda", dtype=torch.bfloat16)
exact = a.double() @ a.double()
assert ((a @ a).double() - exact).norm() / exact.norm() < 1e-2
q = torch.randn(2, 8, 256, 64, device="cuda", dtype=torch.bfloat16)
assert torch.nn.functional.scaled_dot_product_attention(q, q, q).isfinite().all()
p = torch.rand(64, 32000, device="cuda")
assert torch.multinomial(p, 4).max() < 32000 and p.topk(20).values.shape == (64, 20)
assert (p.sort().values.diff() >= 0).all() and p.log_softmax(-1).isfinite().all()
s, graph = torch.zeros(8, device="cuda"), torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    s += 1
graph.replay()
assert s.sum().item() == 8
"""


def slimmed(folder: Path) -> Path:
    """Packages of this machine without what the image lacks; its own files stay as they are."""
    site = Path(sysconfig.get_path("purelib"))
    for name in PACKAGES:
        if (site / name).is_dir():
            subprocess.run(["cp", "-al", str(site / name), str(folder)], check=True)
    found = TAKEN_OUT.search((ROOT / "server" / "cuda.Dockerfile").read_text())
    assert found, "server/cuda.Dockerfile takes nothing out of torch"
    steps = found[1].replace("\\\n", " ").replace("/opt/kvline/bin/python", sys.executable)
    steps = steps.replace("PYTHONPATH=/tmp/slim", f"PYTHONPATH={ROOT}/server:{folder}")
    subprocess.run(["sh", "-euc", steps], cwd=folder, check=True)
    return folder


def test_what_the_cuda_image_lacks_is_not_missed(tmp_path: Path) -> None:
    folder = slimmed(tmp_path)
    path = f"{folder}:{os.environ.get('PYTHONPATH', '')}"
    environment = {**os.environ, "PYTHONPATH": path}
    command = [sys.executable, "-c", WORK]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(folder))
    engine = [sys.executable, "-m", "pytest", "-q", "--import-mode=importlib"]
    engine += ["-p", "no:cacheprovider", "-m", "gpu"]
    engine += ["tests/gpu/test_engine.py", "tests/gpu/test_group.py"]
    subprocess.run(engine, cwd=ROOT, env=environment, check=True)

"""Scores the requests of a file with one of lm-eval's backends; run by lm_eval_scores.py in the
environment of lm-eval, which has none of kvline's packages: python lm_eval_run.py ASKED ANSWERS
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def backend(asked: dict[str, Any]) -> Any:
    """`local-completions` where there is a URL, else `hf`."""
    if "url" not in asked:
        from lm_eval.models.huggingface import HFLM

        return HFLM(
            pretrained=asked["model"],
            device="cpu",
            dtype="float32",
            batch_size=1,
            max_length=asked["max_length"],
            # With it 0.4.13 reads a sum at the wrong tokens where two pairs are the same text, cut
            # at different places: it takes the logits of the longer continuation from their start.
            logits_cache=False,
        )
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    return LocalCompletionsAPI(
        base_url=asked["url"],
        model=asked["served"],
        tokenizer=asked["model"],
        tokenizer_backend="huggingface",
        tokenized_requests=True,
        num_concurrent=4,
        # It keeps one token for the output and one for the context, `hf` does not: with two more a
        # long text is cut into the same windows.
        max_length=asked["max_length"] + 2,
    )


def main(question: Path, answer: Path) -> None:
    from lm_eval.api.instance import Instance

    def instances(kind: str, arguments: list[Any]) -> list[Instance]:
        return [Instance(kind, {}, tuple(a), i) for i, a in enumerate(arguments)]

    asked = json.loads(question.read_text())
    scored = backend(asked)
    pairs, texts = asked["pairs"], asked["texts"]
    found = scored.loglikelihood(instances("loglikelihood", pairs))
    whole = scored.loglikelihood_rolling(instances("loglikelihood_rolling", [[t] for t in texts]))
    answers = {
        "pairs": [
            [float(total), len(scored._encode_pair(*pair)[1]), bool(greedy)]
            for pair, (total, greedy) in zip(pairs, found, strict=True)
        ],
        "texts": [
            [float(total), len(scored.tok_encode(text))]
            for text, total in zip(texts, whole, strict=True)
        ],
    }
    answer.write_text(json.dumps(answers))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))

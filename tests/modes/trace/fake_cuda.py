"""Print what forward passes of small models allocate: tensors that are labelled cuda, and our
stand-in for them.

Without a card, the first need a trick: the device guard of the meta device stands in for CUDA's.
That serves a forward pass; backward asks for a card all the same.
"""

from __future__ import annotations

import ctypes
import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import product
from pathlib import Path

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM
from transformers.utils import import_utils

from training.compat import levers_private
from training.trace.cuda_semantics import Target, attention, cuda_semantics
from training.trace.recorder import Recorder

CUDA, META = 1, 14  # c10::DeviceType
TARGET = Target("8.6")
BATCH, LENGTH = 3, 20
MODELS = {
    "gpt2": {"vocab_size": 300, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "qwen2": {
        "vocab_size": 300,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
    "llama": {
        "vocab_size": 300,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
    },
    "t5": {
        "vocab_size": 300,
        "d_model": 64,
        "d_kv": 16,
        "d_ff": 96,
        "num_layers": 2,
        "num_heads": 4,
        "decoder_start_token_id": 0,
    },
}
PRECISIONS = {
    "fp32": ("float32", None),
    "bf16": ("bfloat16", None),
    "autocast": ("float32", torch.bfloat16),
    "autocast fp16": ("float32", torch.float16),
}


def let_cuda_tensors_live() -> None:
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    guards = (ctypes.c_void_p * (META + 1)).in_dll(
        library, "_ZN3c104impl26device_guard_impl_registryE"
    )
    guards[CUDA] = guards[META]


@contextmanager
def cuda_autocast(dtype: torch.dtype) -> Iterator[None]:
    """torch.autocast("cuda") turns itself off without a card; what it sets, set by hand."""
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", dtype)
    torch.autocast_increment_nesting()
    try:
        yield
    finally:
        if torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()
        torch.set_autocast_enabled("cuda", False)


def on_device(network: torch.nn.Module, device: str) -> None:
    known: dict[int, torch.Tensor] = {}
    for module in network.modules():
        for held in (module._parameters, module._buffers):
            for name, tensor in held.items():
                if tensor is None:
                    continue
                if id(tensor) not in known:
                    empty = torch.empty_strided(
                        tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device
                    )
                    known[id(tensor)] = (
                        torch.nn.Parameter(empty) if held is module._parameters else empty
                    )
                held[name] = known[id(tensor)]


def allocated(
    family: str, attn_implementation: str, precision: str, padded: bool, device: str
) -> tuple[int, list]:
    """Peak of live bytes of a forward pass with loss, and its allocations: (operator, bytes)."""
    dtype, half = PRECISIONS[precision]
    config = AutoConfig.for_model(family, **MODELS[family])
    auto = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    with torch.device("meta"):
        network = auto.from_config(
            config, dtype=getattr(torch, dtype), attn_implementation=attn_implementation
        ).train()
    network.config.use_cache = False
    recorder = Recorder(BATCH)
    recorder.padded = padded
    with FakeTensorMode():
        on_device(network, device)
        tokens = torch.zeros(BATCH, LENGTH, dtype=torch.int64, device=device)
        autocast = (
            cuda_autocast
            if device == "cuda"
            else (lambda dtype: torch.autocast("cpu", dtype=dtype))
        )
        with recorder, autocast(half) if half else nullcontext():
            loss = network(input_ids=tokens, attention_mask=tokens, labels=tokens).loss
        del loss
    log = recorder.settle()
    sizes = [block.fixed_bytes + BATCH * block.sample_bytes for block in log.blocks]
    live = peak = 0
    for event in log.events:
        live += sizes[event.block] if event.birth else -sizes[event.block]
        peak = max(peak, live)
    return peak, [[block.op, size] for block, size in zip(log.blocks, sizes, strict=True)]


def main() -> None:
    warnings.simplefilter("ignore")
    let_cuda_tensors_live()
    # or transformers keeps masks that mask nothing
    import_utils.is_fake_tensor = lambda tensor: False
    library = torch.library.Library("aten", "IMPL")
    # it asks a card for its kernels
    library.impl("scaled_dot_product_attention", attention(TARGET), "AutogradCUDA")
    setattr(*levers_private.grouped_heads(has_flash=True))  # as training/levers/attention.py
    found = {}
    for case in product(MODELS, ("sdpa", "eager"), PRECISIONS, (True, False)):
        labelled = allocated(*case, "cuda")
        with cuda_semantics(TARGET):
            found["{}, {}, {}, padded {}".format(*case)] = {
                "cuda": labelled,
                "stand-in": allocated(*case, "cpu"),
            }
    print(json.dumps(found))


if __name__ == "__main__":
    main()

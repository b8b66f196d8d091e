"""Merge a LoRA adapter into its base, as one ordinary folder, or pack its base in 4 bits beside it.
`python -m launch merge` and `export` start it."""

import json
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from launch.base import files, modules, processes
from launch.base.errors import ResourceError, StorageError
from launch.base.text import cause
from launch.schema.result import MAX_SHARD_BYTES, ExportedModel


def merge(base: Path, adapter: Path, out: Path) -> None:
    """Write `out` under another name, compare it with the adapter on its base, and rename it. The
    weights keep the base's dtype, and their sum is rounded once."""
    with modules.uncollected():
        from training.compat import peft_private
        from training.data import tokenizer
        from training.loop import exported_files
        from training.model import build, merging

    try:
        base_model = _load(base)
        source = adapter if (adapter / "tokenizer_config.json").is_file() else base
        merged_tokenizer = tokenizer.load(source)
        build.prepare_base(base_model, merged_tokenizer, adapter)
        adapted = peft_private.with_adapter(base_model, adapter)
    except (OSError, ValueError, RuntimeError) as error:
        raise ResourceError(f"{adapter} on {base}: cannot be loaded ({cause(error)})") from error
    expected = merging.logits(adapted, merged_tokenizer)
    try:
        merged = merging.merged(adapted, partial(adapted.merge_and_unload, safe_merge=True))
    except ValueError as error:  # values that are not finite
        raise ResourceError(f"{adapter}: {cause(error)}; take another checkpoint") from error
    with _new_folder(out) as aside:
        exported_files.save_model(merged, aside, json.loads((base / "config.json").read_bytes()))
        for line in exported_files.save_tokenizer(merged_tokenizer, aside, source):
            print(line)
        loading = tokenizer.loading_of(source, None)
        facts = ExportedModel(f"merge of {adapter}", base=str(base), tokenizer_loading=loading)
        files.write_json(aside / "lowmem.json", facts)
        del base_model, adapted, merged  # before the model is there a second time
        merging.check(merging.logits(_load(aside), merged_tokenizer), expected, str(out))
    exported = files.read(adapter / "lowmem.json", ExportedModel)
    if exported and exported.quantization:
        print(
            "the adapter was trained on 4-bit weights; it is merged into the full-precision weights"
        )


def pack(base: Path, adapter: Path, out: Path) -> None:
    """Write the adapter's folder with its base beside it, as `base`, whose linear weights have the
    4 bits that the adapter was trained on. What is loaded again has the logits of the adapter on
    the base that is packed while it loads."""
    with modules.uncollected():
        from launch.schema.model_sections import QuantizationSection
        from training.compat import peft_private
        from training.data import tokenizer
        from training.loop import exported_files
        from training.model import build, four_bit, merging

    facts = files.read(adapter / "lowmem.json", ExportedModel)
    assert facts and facts.quantization
    in_4_bits = four_bit.config(QuantizationSection.model_validate(facts.quantization))
    of_adapter = tokenizer.load(adapter)

    def logits(model: Any) -> Any:
        return merging.logits(peft_private.with_adapter(model, adapter), of_adapter)

    try:
        with four_bit.giving_blocks_back():
            # other types round the weights before they are packed
            dtype = facts.dtype or "auto"
            model = _load(base, dtype=dtype, quantization_config=in_4_bits, device_map={"": "cpu"})
        build.prepare_base(model, of_adapter, adapter)
    except (OSError, ValueError, RuntimeError) as error:
        raise ResourceError(f"{base}: cannot be loaded in 4 bits ({cause(error)})") from error
    with _new_folder(out) as aside:
        shutil.copytree(adapter, aside, dirs_exist_ok=True)
        model.save_pretrained(aside / "base", max_shard_size=MAX_SHARD_BYTES)
        for line in exported_files.save_tokenizer(of_adapter, aside / "base", adapter):
            print(line)
        expected = logits(model)
        del model
        merging.check(logits(_load(aside / "base")), expected, str(out))


def _load(folder: Path, **options: Any) -> Any:
    """The model of a folder, in the types of its files unless `options` name another."""
    from training.model import build

    is_pair = build.folder_config(folder).is_encoder_decoder
    return build.pretrained(folder, is_pair, **{"dtype": "auto", **options})


@contextmanager
def _new_folder(out: Path) -> Iterator[Path]:
    """A folder that gets the name `out` once it is written. Raises StorageError."""
    aside = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    try:
        aside.mkdir(parents=True)
        yield aside
        files.sync_all(aside)
        if out.exists():
            out.rmdir()  # empty, as was checked before the start
        aside.rename(out)
    except OSError as error:
        raise StorageError(
            f"{error.filename or out}: {error.strerror}; free some space, or give another --out"
        ) from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)


# name -> program, the optional packages that it needs
PROGRAMS = {"merge": (merge, ("peft",)), "pack": (pack, ("peft", "bitsandbytes"))}

if __name__ == "__main__":
    program, needed = PROGRAMS[sys.argv[1]]
    modules.leave_out(package for package in modules.OPTIONAL if package not in needed)
    sys.exit(processes.child_main(program, *map(Path, sys.argv[2:])))

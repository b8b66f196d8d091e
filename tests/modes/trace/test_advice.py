"""Where nothing fits, each way out that is offered does; where whole copies crawl, copies shared
out are taken."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from tests import builders


def described(folder: Path, free_gib: tuple[float, ...], available_gib: float) -> str:
    """A machine file: RTX 3090s with so much free, and a host of twice what is available."""
    machine = yaml.safe_load((builders.CODE / "configs/machines/2x3080-20g-16g.yaml").read_text())
    card = {**machine["gpus"][0], "name": "NVIDIA GeForce RTX 3090", "total_gib": 24.0}
    machine["gpus"] = [{**card, "index": at, "free_gib": free} for at, free in enumerate(free_gib)]
    machine |= {"host_limit_gib": 2 * available_gib, "host_available_gib": available_gib}
    path = folder / "machine.yaml"
    path.write_text(yaml.safe_dump(machine), encoding="utf-8")
    return str(path)


def offered(stderr: str) -> list[list[str]]:
    """The flags of each way out."""
    ways = stderr.partition("This would fit:\n")[2].splitlines()
    return [re.sub(r" \([^()]*\)$", "", way).split() for way in ways if way.startswith("  ")]


def test_a_model_that_the_host_cannot_build_is_refused_and_what_is_offered_fits(tmp_path):
    on = ["--machine", described(tmp_path, (23.6,), 3.2)]
    words = ["plan", "sft_fast", "--launch.mode=single_gpu", *on]
    refused = builders.launch(tmp_path / "workspace", *words)
    assert refused.returncode == 3
    missed = (
        r"single_gpu x1, batch 16 x 2, rows sorted by length: short by 0\.\d\d GiB of host RAM:"
        r" 2\.\d\d GiB in host RAM in load, budget 2\.40 GiB \(3\.20 GiB available"
    )
    assert re.search(missed, refused.stderr)
    ways = offered(refused.stderr)
    assert ["--model.dtype=bfloat16"] in ways
    for way in ways:
        taken = builders.launch(tmp_path / "workspace", *words, *way)
        assert taken.returncode == 0, (way, taken.stderr)


def test_a_way_out_that_fits_takes_one_trace(tmp_path):
    """It is not traced with activations on the host as well, nor with fewer checkpointed layers."""
    machine = str(builders.CODE / "configs/machines/2x3080-20g-16g.yaml")
    model = ("--model.shape=qwen2.5-1.5b", "--data.max_length=512")
    words = ["plan", "sft_fast", *model, "--machine", machine]
    traces = tmp_path / "traces"
    refused = builders.launch(tmp_path / "workspace", *words, LOWMEM_TRACES=str(traces))
    assert refused.returncode == 3, refused.stdout
    ways = offered(refused.stderr)
    assert len(ways) == 3
    # the others are of ways that do not fit
    assert len(list(traces.glob("*.json"))) <= 3 * len(ways)


def test_beside_a_card_that_is_nearly_full_the_free_one_alone_is_taken(tmp_path):
    words = ["plan", "sft_fast", "--machine", described(tmp_path, (23.6, 0.5), 32.0)]
    automatic = builders.launch(tmp_path / "workspace", *words)
    assert automatic.returncode == 0, automatic.stderr
    assert "x 1 process =" in automatic.stdout
    assert "= 64 effective" in automatic.stdout


@pytest.mark.campaign
def test_where_whole_copies_fit_in_single_samples_only_sharded_ones_are_taken_if_faster(
    tmp_path,
):
    on = ["--machine", described(tmp_path, (7.6, 7.6), 32.0)]
    words = ["plan", "sft_fast", "16", "--explain", "--launch.vram_fraction=0.5", *on]
    automatic = builders.launch(tmp_path / "workspace", *words)
    assert automatic.returncode == 0, automatic.stderr
    chosen = re.search(r"(\S+) x2, batch .* ([\d.]+)  chosen", automatic.stdout)
    assert chosen is not None
    named = builders.launch(tmp_path / "workspace", *words, "--launch.mode=deepspeed_zero1")
    other = re.search(r"deepspeed_zero1 x2, batch .* ([\d.]+)  chosen", named.stdout)
    assert other is not None
    assert float(chosen[2]) <= 1.05 * float(other[1])


def test_data_workers_are_as_many_as_the_cpus_feed_and_fewer_where_host_ram_has_no_room(tmp_path):
    recipe = str(builders.recipe(tmp_path, training={"per_device_train_batch_size": 4}))
    # batches that wait, so that a step has more in host RAM than a load
    ahead = ["--data.max_length=512", "--training.dataloader_prefetch_factor=512"]

    def planned(available_gib: float, *words: str) -> tuple[str, float]:
        """(what the plan says of data workers, GiB of host RAM)"""
        on = [
            "--machine",
            described(tmp_path, (23.6,), available_gib),
            "--launch.host_reserve_gib=0",
        ]
        done = builders.launch(
            tmp_path / "workspace", "plan", "--explain", recipe, *on, *ahead, *words
        )
        assert done.returncode == 0, done.stderr
        said = re.search(r"data workers \d+(?::| instead) .*", done.stdout)
        needed = re.search(
            r"host RAM   ([\d.]+) GiB predicted of .*, most in (?:train|save|step)", done.stdout
        )
        assert needed is not None, done.stdout
        return said[0] if said else "", float(needed[1])

    roomy, needed = planned(32)
    assert roomy == "data workers 4: 8 CPUs over 1 process(es)"
    for left_out, workers in ((0.02, (2, 3)), (0.1, (1, 2))):
        said, takes = planned(needed - left_out)
        found = re.fullmatch(r"data workers (\d) instead of 4: host RAM has no room for more", said)
        assert found is not None, said
        assert int(found[1]) in workers
        assert takes <= needed - left_out + 0.005
    asked, takes = planned(
        32, "--training.dataloader_num_workers=6", "--training.dataloader_prefetch_factor=999"
    )
    assert asked == "", "a number that was asked for needs no reason"
    assert takes > needed


def test_fewer_streamed_layers_than_all_are_tried_where_the_host_is_small(tmp_path):
    """All 80 take 31.9 GiB of the host, as many as the card lacks 29.7."""
    words = ["plan", "lora_sft", "--model.shape=llama3.1-70b", "--gpu=RTX 4090", "--ram=32"]
    done = builders.launch(tmp_path / "workspace", *words)
    assert done.returncode == 0, done.stderr
    streamed = re.search(r"streamed_layers 0 -> (\d+)", done.stdout)
    assert streamed and 3 <= int(streamed[1]) < 80
    refused = builders.launch(tmp_path / "workspace", *words, "--training.streamed_layers=80")
    assert refused.returncode == 3 and "of host RAM" in refused.stderr

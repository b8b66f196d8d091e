"""Names of cards as people write them, and the flags that describe a machine with words."""

from __future__ import annotations

import pytest

from launch.base.errors import ConfigError
from launch.probe import cards
from launch.schema.machine import MIB
from tests.builders import launch


@pytest.mark.parametrize(
    ("written", "name", "mib"),
    [
        ("RTX 3090", "RTX 3090", 24576),
        ("3090", "RTX 3090", 24576),
        ("NVIDIA GeForce RTX 3090 Ti", "RTX 3090 Ti", 24564),
        ("rtx 2080 ti", "RTX 2080 Ti", 11264),
        ("RTX 3060 12GB", "RTX 3060", 12288),
        ("RTX 3080 20 GB", "RTX 3080", 20480),
        ("4060 Ti 16GB", "RTX 4060 Ti", 16380),
        ("RTX 4070 Ti Super", "RTX 4070 Ti SUPER", 16376),
        ("RTX4090", "RTX 4090", 24564),
        ("3080ti", "RTX 3080 Ti", 12288),
        ("A5000", "RTX A5000", 24564),
        ("RTX A5000 Laptop GPU", "RTX A5000 Laptop", 16384),
        ("GeForce RTX 4090 Laptop GPU", "RTX 4090 Laptop", 16376),
        ("3080 laptop 8GB", "RTX 3080 Laptop", 8192),
        ("RTX 6000 Ada Generation", "RTX 6000 Ada", 49140),
        ("Tesla T4", "T4", 15360),
        ("V100 32GB", "V100", 32768),
        ("Tesla V100-SXM2-16GB", "V100 SXM2", 16384),
        ("A100-SXM4-80GB", "A100 SXM4", 81920),
        ("A100 80GB PCIe", "A100", 81920),
        ("A800", "A800", 81920),
        ("A800 SXM 80GB", "A800 SXM4", 81920),
        ("4090D", "RTX 4090 D", 24564),
        ("H800", "H800", 81559),
        ("H100 SXM", "H100 80GB HBM3", 81559),
        ("H100 80GB HBM3", "H100 80GB HBM3", 81559),
        ("H100 PCIe", "H100 PCIe", 81559),
        ("H200", "H200", 143771),
        ("B200", "B200", 183359),
        ("Radeon RX 7900 XTX", "RX 7900 XTX", 24560),
        ("AMD Instinct MI300X", "MI300X", 196592),
        ("mi210", "MI210", 65520),
    ],
)
def test_a_card_is_read_as_people_write_it(written, name, mib):
    row = cards.by_words(written)
    assert (row.name, row.total_bytes) == (name, mib * MIB)


@pytest.mark.parametrize("row", cards.table(), ids=lambda row: f"{row.name} {row.gb}")
def test_the_full_name_of_every_row_names_it_and_its_described_card_has_its_peaks(row):
    assert cards.by_words(row.full_name) == row
    gpu = row.described(1)
    assert (gpu.index, gpu.free_bytes) == (1, row.total_bytes)
    assert cards.look_up(gpu) == (row, True)


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("RTX 3080", "several of that name: RTX 3080 10GB, RTX 3080 12GB, RTX 3080 20GB"),
        ("A100", "several of that name: A100 40GB, A100 80GB"),
        ("H100", "several of that name: H100 PCIe, H100 80GB HBM3"),
        ("NVIDIA RTX", "no such card in configs/cards.yaml; "),
        ("RTX 3090 48GB", "no such card in configs/cards.yaml; nearest: RTX 3090, RTX 3090 Ti"),
        ("RTX 3091", "nearest: RTX 3090"),
        ("banana", "no such card in configs/cards.yaml; it has V100 SXM2 16GB"),
    ],
)
def test_a_name_of_no_card_or_of_several_is_refused_with_the_nearest(written, said):
    with pytest.raises(ConfigError) as caught:
        cards.by_words(written)
    assert said in str(caught.value)
    assert str(caught.value).startswith(f"--gpu: {written}: ")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--gpu", "RTX 3090"), "--gpu: expected --ram GIB beside it"),
        (("--ram", "32"), "--ram: expected --gpu NAME beside it"),
        (("--gpus=2",), "--gpus: expected --gpu NAME beside it"),
        (("--gpu=2x 3090", "--gpus=2", "--ram=32"), "--gpus 2: --gpu has a number too; leave one"),
        (("--gpu=0x 3090", "--ram=32"), "--gpu 0: expected a number from 1"),
        (("--gpu=3090 x 65", "--ram=32"), "--gpu 65: expected a number from 1"),
        (("--gpu", "3090", "--ram=0"), "--ram 0: expected the RAM in GiB"),
        (("--gpu", "3090", "--ram=32G"), "--ram 32G: expected the RAM in GiB"),
        (("--gpu", "3090", "--ram=32", "--gpus=0"), "--gpus 0: expected a number from 1"),
        (("--gpu", "3090", "--ram=32", "--machine=x.yaml"), "--machine and --gpu: expected one"),
    ],
)
def test_flags_that_describe_no_machine_are_refused_in_a_line(tmp_path, words, said):
    done = launch(tmp_path, "doctor", *words)
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: {said}")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "words",
    [
        ("--gpu", "RTX 4090", "--gpus", "2"),
        *(
            ("--gpu", text)
            for text in (
                *("2x 4090", "2 x RTX4090", "2xRTX4090", "2X RTX 4090", "RTX 4090 x2"),
                *("RTX4090 x 2", "rtx 4090*2", "4090x2", "RTX 4090 × 2"),
            )
        ),
    ],
)
def test_doctor_describes_a_machine_of_words_and_says_what_is_assumed(tmp_path, words):
    done = launch(tmp_path, "doctor", *words, "--ram", "64")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "machine: 2x RTX 4090"
    assert lines[1] == (
        "GPU 0: NVIDIA RTX 4090, 23.99 GiB free of 23.99 GiB, 8.9, driver unknown"
        " (configs/cards.yaml: RTX 4090, PCIe 4.0)"
    )
    assert "host memory limit: 64.00 GiB (described)" in lines
    assert "host memory available: 64.00 GiB (assumed)" in lines
    assert lines[-2].startswith("assumed: all of each card's memory is free, driver not known")

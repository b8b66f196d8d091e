"""Stands in for training.link: what one rank does is in the file FAKE_LINK, a line each, by backend
and NCCL variables.

"gloo: work", "nccl NCCL_P2P_DISABLE=1: say shm-too-small.txt", ...; "*" for all others. Each call
is a line in FAKE_LINK_CALLS, a dict as Python writes it. It starts hundreds of times in a test run,
so it imports nothing that is not in memory: json takes as long as all the rest.
"""

from __future__ import annotations

import os
import sys
import time

DATA = f"{os.path.dirname(__file__)}/../../data/link"  # noqa: PTH120  pathlib takes as long to import
FLAGS = ["--backend", "--device", "--rank", "--world-size", "--store", "--timeout-s"]


def main() -> None:
    given = dict(zip(sys.argv[1::2], sys.argv[2::2], strict=True))
    assert list(given) == FLAGS, given
    backend, rank = given["--backend"], given["--rank"]
    chosen = {key: value for key, value in sorted(os.environ.items()) if key.startswith("NCCL_")}
    chosen.pop("NCCL_DEBUG", None)
    key = " ".join([backend, *(f"{name}={value}" for name, value in chosen.items())])
    call = {"key": key, "rank": int(rank), "pid": os.getpid(), "env": dict(os.environ)}
    with open(os.environ["FAKE_LINK_CALLS"], "a") as calls:  # noqa: PTH123  one write: lines of ranks do not mix
        calls.write(f"{call}\n")
    behaviours = dict(line.split(": ", 1) for line in read(os.environ["FAKE_LINK"]).splitlines())
    word, _, detail = behaviours.get(key, behaviours.get("*", "hang")).partition(" ")
    if word == "cold":  # the first start never ends, the second one does and hangs
        first = read(os.environ["FAKE_LINK_CALLS"]).count(f"'rank': {rank},") == 1
        word = "never-start" if first else "hang"
    if word == "never-start":
        time.sleep(600)
    print("link test: ready", flush=True)
    if word == "leave":  # a segment in /dev/shm, as a rank that is killed leaves it
        os.close(os.open(os.path.join(os.environ["FAKE_SHM"], f"nccl-{os.getpid()}"), os.O_CREAT))  # noqa: PTH118
        time.sleep(600)
    if word == "one-fails":  # and the other waits for it
        if rank == "0":
            sys.exit(detail)
        time.sleep(600)
    if word == "hang" and detail in ("", rank):
        time.sleep(600)
    if word == "killed":
        os.kill(os.getpid(), int(detail))
    if word == "say":
        sys.exit(read(f"{DATA}/{detail}").partition("\n")[2])  # without its source
    if word == "print":
        sys.exit(detail)
    if rank == "0" and word != "silent":
        named = f'"backend": "{detail or backend}", "world_size": {given["--world-size"]}'
        print(f'{{{named}, "nccl": null, "bus_bytes_per_s": 5e9, "flops_per_s": 1e13}}')


def read(path: str) -> str:
    with open(path, encoding="utf-8") as file:  # noqa: PTH123
        return file.read()


if __name__ == "__main__":
    main()

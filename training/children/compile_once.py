"""Compile one small function for the first card: python -m training.children.compile_once. Prints a
line of JSON with the reason why torch.compile cannot run here, or none."""

import json

import torch


def main() -> None:
    reason = ""
    try:
        torch.compile(lambda tensor: (tensor + 1).relu())(torch.ones(64, device="cuda"))
    except Exception as error:  # noqa: BLE001  whatever a compiler lacks is a reason
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        reason = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    print(json.dumps({"reason": reason}))


if __name__ == "__main__":
    main()

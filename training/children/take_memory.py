"""Take a card's memory, as another program would: python -m training.children.take_memory. It makes
a context, reads a number from standard input, and takes all but so many bytes until the input
ends."""

import sys

import torch


def main() -> None:
    torch.zeros(1, device="cuda")
    left_bytes = int(sys.stdin.readline() or 0)
    free_bytes, _ = torch.cuda.mem_get_info()
    taken = torch.empty(max(free_bytes - left_bytes, 0), dtype=torch.uint8, device="cuda")
    print(f"took {taken.numel()} of {free_bytes} bytes", flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()

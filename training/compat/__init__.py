import logging

# bitsandbytes warns on import of an optional package for 4-bit weights on CPUs
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)

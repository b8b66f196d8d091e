"""Answers as AMD's amdsmi does for one Radeon RX 9070 XT; sizes and driver are made up."""


class AmdSmiException(Exception):
    pass


def amdsmi_init():
    pass


def amdsmi_shut_down():
    pass


def amdsmi_get_processor_handles():
    return ["handle"]


def amdsmi_get_gpu_asic_info(handle):
    return {
        "market_name": "AMD Radeon RX 9070 XT",
        "vendor_id": "0x1002",
        "vendor_name": "Advanced Micro Devices Inc. [AMD/ATI]",
        "subvendor_id": "0x7550",
        "device_id": "0x7550",
        "rev_id": "0xc0",
        "asic_serial": "0xCE5D239FE548AF74",
        "oam_id": 0,
        "num_compute_units": 64,
        "target_graphics_version": "gfx1201",
        "subsystem_id": "0x1002",
        "flags": 0,
    }


def amdsmi_get_gpu_vram_usage(handle):
    return {"vram_total": 16304, "vram_used": 304}


def amdsmi_get_gpu_driver_info(handle):
    return {"driver_name": "amdgpu", "driver_version": "6.14.14", "driver_date": "2015/01/01 00:00"}

"""What the kernel says about a piece of this process's memory."""

from pathlib import Path


def memory_flags(address: int) -> list[str]:
    """The flags of the mapping that holds `address`: `dd` means that no core dump has it."""
    is_here = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split()[0]
        if "-" in first and not first.endswith(":"):
            low, high = (int(each, 16) for each in first.split("-"))
            is_here = low <= address < high
        elif is_here and first == "VmFlags:":
            return line.split()[1:]
    raise AssertionError("it is not mapped")

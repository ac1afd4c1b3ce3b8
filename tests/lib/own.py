"""Properties of this host's libraries, from ELF, the loader's cache and Debian's folders."""

import os

MACHINE = os.uname().machine
# Debian's folders for 64-bit libraries, and for 32-bit libraries.
TRIPLET, TRIPLET32 = {
    "x86_64": ("x86_64-linux-gnu", "i386-linux-gnu"),
    "aarch64": ("aarch64-linux-gnu", "arm-linux-gnueabihf"),
}[MACHINE]
FOLDER, FOLDER32 = f"/usr/lib/{TRIPLET}", f"/usr/lib/{TRIPLET32}"
# e_machine and e_flags of an ELF header, from elf.h. ARM's flags mean EABI5 with hardware
# floating point.
ELF, ELF32 = {"x86_64": ((62, 0), (3, 0)), "aarch64": ((183, 0), (40, 0x05000400))}[MACHINE]
# An entry's flags in ld.so.cache, and the words that ldconfig -p prints for 64-bit entries.
FLAGS, FLAGS32 = {"x86_64": (0x0303, 0x0003), "aarch64": (0x0A03, 0x0903)}[MACHINE]
ABI = {"x86_64": "libc6,x86-64", "aarch64": "libc6,AArch64"}[MACHINE]

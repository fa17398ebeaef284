"""The seccomp filter of a cell: system calls that its programs may not make.

The filter is a classic BPF program, built here without a library. It refuses what a program of a
task never needs: mounts and namespaces, tracing of other processes, keys, kernel modules, io_uring,
bpf, sockets other than Unix and internet ones, and memory that no process limit counts (memfd,
System V shared memory, shared anonymous mappings, pages given to a pipe, and larger buffers of
pipes and sockets). A call in another ABI (i386, x32) kills the
process. clone3 is reported as missing, because a filter cannot read its flags; libc then uses
clone.
"""

from __future__ import annotations

import errno
import struct
from collections.abc import Sequence

_LOAD, _JUMP_EQUAL, _JUMP_AT_LEAST, _AND, _RETURN = 0x20, 0x15, 0x35, 0x54, 0x06
_NUMBER, _ARCH = 0, 4  # offsets in struct seccomp_data
_KILL_PROCESS, _ALLOW, _ERRNO = 0x80000000, 0x7FFF0000, 0x00050000
_X32 = 0x40000000

AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}

DENIED: dict[str, tuple[int | None, int | None]] = {
    # other processes
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "kcmp": (312, 272),
    "pidfd_getfd": (438, 438),
    # mounts, namespaces, file handles
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "statmount": (457, 457),
    "listmount": (458, 458),
    "open_tree_attr": (467, 467),
    "unshare": (272, 97),
    "setns": (308, 268),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    # large kernel interfaces
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "fanotify_init": (300, 262),
    "lookup_dcookie": (212, 18),
    "syslog": (103, 116),
    # memory that belongs to no process
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "shmat": (30, 196),
    "shmctl": (31, 195),
    "msgget": (68, 186),
    "semget": (64, 190),
    "mq_open": (240, 180),
    "splice": (275, 76),
    "tee": (276, 77),
    "vmsplice": (278, 75),
    "io_setup": (206, 0),
    # the machine
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "reboot": (169, 142),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "acct": (163, 89),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "clock_adjtime": (305, 266),
    "adjtimex": (159, 171),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    "vhangup": (153, 58),
    "ioperm": (173, None),
    "iopl": (172, None),
    "modify_ldt": (154, None),
    "uselib": (134, None),
    "ustat": (136, None),
    "sysfs": (139, None),
    "nfsservctl": (180, 42),
    # placement of memory
    "mbind": (237, 235),
    "set_mempolicy": (238, 237),
    "set_mempolicy_home_node": (450, 450),
    "migrate_pages": (256, 238),
    "move_pages": (279, 239),
}
"""System calls that fail with EPERM: name -> number on x86_64 and on aarch64."""

_CLONE3 = (435, 435)
_CLONE, _SOCKET, _SOCKETPAIR = (56, 220), (41, 198), (53, 199)
_MMAP, _PERSONALITY, _IOCTL = (9, 222), (135, 92), (16, 29)

_FCNTL, _SETSOCKOPT = (72, 25), (54, 208)

_FAMILIES = (1, 2, 10)  # AF_UNIX, AF_INET, AF_INET6
_NEW_NAMESPACES = 0x7E020080  # all CLONE_NEW* flags
_SHARED_ANONYMOUS = 0x21
_PROTOCOLS = (33, 132, 136, 262)  # DCCP, SCTP, UDP-Lite, MPTCP: `watch` does not count them
_PIPE_SIZE = (1031,)  # F_SETPIPE_SZ
_BUFFERS = (7, 8, 32, 33, 60)  # SO_SNDBUF, SO_RCVBUF, both with FORCE, SO_ZEROCOPY
_TERMINAL_INPUT = (0x5412, 0x541C)  # TIOCSTI, TIOCLINUX


def seccomp_filter(machine: str) -> bytes:
    """The filter as an array of `struct sock_filter`, in the form that `bwrap --seccomp` reads.

    Args:
        machine: as `platform.machine()` reports it.

    Returns:
        Empty if there is no filter for the machine.
    """
    if machine not in AUDIT_ARCH:
        return b""
    column = list(AUDIT_ARCH).index(machine)
    code = _Filter()
    code.load(_ARCH)
    code.unless(_JUMP_EQUAL, AUDIT_ARCH[machine], _KILL_PROCESS)
    code.load(_NUMBER)
    if machine == "x86_64":
        code.when(_JUMP_AT_LEAST, _X32, _KILL_PROCESS)
    for numbers in DENIED.values():
        number = numbers[column]
        if number is not None:
            code.when(_JUMP_EQUAL, number, _ERRNO | errno.EPERM)
    code.when(_JUMP_EQUAL, _CLONE3[column], _ERRNO | errno.ENOSYS)
    code.refused(_SOCKET[column], 2, _PROTOCOLS)
    code.refused(_FCNTL[column], 1, _PIPE_SIZE)
    code.refused(_SETSOCKOPT[column], 2, _BUFFERS)
    code.arguments(_CLONE[column], 0, [0], errno.EPERM, mask=_NEW_NAMESPACES)
    for call in (_SOCKET, _SOCKETPAIR):
        code.arguments(call[column], 0, _FAMILIES, errno.EAFNOSUPPORT)
    code.arguments(_PERSONALITY[column], 0, (0, 0xFFFFFFFF), errno.EPERM)
    code.refused(_MMAP[column], 3, [_SHARED_ANONYMOUS], mask=_SHARED_ANONYMOUS)
    code.refused(_IOCTL[column], 1, _TERMINAL_INPUT)
    code.end(_ALLOW)
    return bytes(code.program)


class _Filter:
    """A BPF program under construction. The accumulator holds the call's number between rules."""

    def __init__(self) -> None:
        self.program = bytearray()

    def _add(self, code: int, value: int, true: int = 0, false: int = 0) -> None:
        self.program += struct.pack("=HBBI", code, true, false, value)

    def load(self, offset: int) -> None:
        self._add(_LOAD, offset)

    def end(self, action: int) -> None:
        self._add(_RETURN, action)

    def when(self, jump: int, value: int, action: int) -> None:
        """Return `action` if the comparison holds."""
        self._add(jump, value, 0, 1)
        self.end(action)

    def unless(self, jump: int, value: int, action: int) -> None:
        """Return `action` if the comparison does not hold."""
        self._add(jump, value, 1, 0)
        self.end(action)

    def arguments(
        self, number: int, index: int, allowed: Sequence[int], error: int, mask: int = 0xFFFFFFFF
    ) -> None:
        """Allow a call only if an argument, after `mask`, is one of the values."""
        values = allowed
        self._add(_JUMP_EQUAL, number, 0, 4 + 2 * len(values) - 1)
        self._argument(index, mask)
        for value in values:
            self.when(_JUMP_EQUAL, value, _ALLOW)
        self.end(_ERRNO | error)

    def refused(
        self, number: int, index: int, values: Sequence[int], mask: int = 0xFFFFFFFF
    ) -> None:
        """Refuse a call if an argument, after `mask`, is one of the values. Later rules follow."""
        listed = values
        self._add(_JUMP_EQUAL, number, 0, 4 + 2 * len(listed) - 1)
        self._argument(index, mask)
        for value in listed:
            self.when(_JUMP_EQUAL, value, _ERRNO | errno.EPERM)
        self.load(_NUMBER)

    def _argument(self, index: int, mask: int) -> None:
        """Load the low half of an argument. Both machines are little-endian."""
        self.load(16 + 8 * index)
        self._add(_AND, mask)

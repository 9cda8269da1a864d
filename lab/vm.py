"""Hosts with kernels of their own: virtual machines by QEMU, in the place of containers.

A machine boots from a disk that is an overlay on an image, which is made once and kept beside its root. Kernel and
initrd come from outside, so no boot loader is needed. KVM where it works, emulation elsewhere.
"""

import hashlib
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from lab import base, door, machine
from lab.host import Host
from lab.shell import locked, run

TOOLS = {"qemu-system-x86_64": "qemu-system-x86", "qemu-img": "qemu-utils", "mkfs.ext4": "e2fsprogs"}
KERNEL = "linux-image-amd64"  # the cloud kernel has no RDMA
DISK_SIZE = "20G"  # holes, mostly
KVM = Path("/dev/kvm")
PROBE_SECONDS = 20
ACCELERATORS = {
    "kvm": ("-machine", "q35,accel=kvm", "-cpu", "host"),
    "tcg": ("-machine", "q35", "-accel", "tcg,thread=multi", "-cpu", "max"),
}

# Before systemd starts for the first time, what makes this machine itself is laid over the root.
FIRST_BOOT = """\
#!/bin/sh
test "$1" != prereqs || exit 0
test ! -s "$rootmnt/etc/machine-id" || exit 0
mount -t 9p -o ro,trans=virtio,version=9p2000.L itself "$rootmnt/mnt"
chroot "$rootmnt" sh -c 'cp -a /mnt/. / && sync'
umount "$rootmnt/mnt"
"""

# The initrd is made from a copy of the root's settings, in a /run that ends with this shell: the root stays as it is.
MAKE_IMAGE = r"""
set -eu
mount -t tmpfs tmpfs "$1/run"
cp -r "$1/etc/initramfs-tools" "$1/run/initramfs"
cd "$1/run/initramfs"
sed -i 's/^MODULES=.*/MODULES=list/' initramfs.conf
printf '%s\n' virtio_pci virtio_blk ext4 9pnet_virtio 9p > modules
mkdir -p scripts/local-bottom
printf %s "$3" > scripts/local-bottom/first-boot
chmod +x scripts/local-bottom/first-boot
cd /
chroot "$1" mkinitramfs -d /run/initramfs -o /run/initrd "$(ls "$1/usr/lib/modules")"
cp "$1/run/initrd" "$2/initrd"
cp "$1"/boot/vmlinuz-* "$2/kernel"
umount "$1/run"
truncate --size "$4" "$2/disk"
mkfs.ext4 -q -F -m 1 -E lazy_itable_init=0,lazy_journal_init=0 -d "$1" "$2/disk"
"""

# The taps stay when a machine goes off, and go with the namespace.
LAUNCH = r"""
set -eu
for file in $RUN_PROCS; do echo $$ > "$file"; done
for wire in $WIRES; do
  tap=${wire%:*}
  ip link show "$tap" >/dev/null 2>&1 || ip tuntap add "$tap" mode tap
  ip link set "$tap" master "${wire#*:}" up
done
exec "$@"
"""

DOOR_UNIT = """\
[Unit]
Description=The lab's way in

[Service]
ExecStart=/usr/bin/python3 -I /usr/local/lib/lab-door.py
Restart=always

[Install]
WantedBy=multi-user.target
"""


def obstacles() -> list[str]:
    """Why this machine cannot have virtual machines, beyond what a lab of containers needs."""
    found = []
    system = machine.os_release().get("ID", "an unknown system"), os.uname().machine
    if system != ("debian", "x86_64"):
        found.append(
            f"virtual machines boot Debian's kernel for x86_64; this machine is {' on '.join(system)}"
        )
    if not Path("/dev/net/tun").exists():
        found.append("this kernel has no /dev/net/tun. Type: sudo modprobe tun")
    return found


def image(root: Path) -> Path:
    """The folder with `kernel`, `initrd` and `disk` of ROOT, which must have a kernel; made now if it is not there."""
    key = hashlib.sha256(repr((FIRST_BOOT, MAKE_IMAGE, DISK_SIZE)).encode()).hexdigest()
    folder = root.with_name(f"{root.name}-vm-{key[:6]}")
    if not folder.exists():
        with locked(base.CACHE / ".lock", waiting="Waiting for another build of a root …"):
            if not folder.exists():
                print("Making a disk of it, once (some seconds) …", flush=True)
                work = base.CACHE / f".building-{folder.name}"
                shutil.rmtree(work, ignore_errors=True)
                work.mkdir(mode=0o700)
                make = ("sh", "-c", MAKE_IMAGE, "-", root, work, FIRST_BOOT, DISK_SIZE)
                run("setpriv", "--pdeathsig", "KILL", "unshare", "--mount", *make)
                work.rename(folder)
    return folder


def accelerator(folder: Path) -> str:
    """What runs machines here: kvm where it boots FOLDER's kernel in good time, else tcg. Tried once a boot."""
    note = folder / "accelerator"
    this_boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    boot, _, found = note.read_text().partition(" ") if note.exists() else ("", "", "")
    if boot != this_boot:
        found = "kvm" if KVM.exists() and _boots(folder, "kvm") else "tcg"
        note.write_text(f"{this_boot} {found}")
    return found


def _boots(folder: Path, accel: str) -> bool:
    """Does the kernel come as far as its first program? That one ends at once, and with it the machine."""
    command = [
        *("setpriv", "--pdeathsig", "KILL", "qemu-system-x86_64", *ACCELERATORS[accel]),
        *("-nodefaults", "-display", "none", "-serial", "stdio"),
        *("-no-reboot", "-m", "512", "-kernel", folder / "kernel", "-initrd", folder / "initrd"),
        *("-append", "console=ttyS0 panic=-1 rdinit=/bin/true"),
    ]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=PROBE_SECONDS)
    except subprocess.TimeoutExpired:
        return False
    return b"Run /bin/true as init" in done.stdout


@dataclass
class VirtualMachine(Host):
    """A host that is a virtual machine. SECOND is the name of its interface on the second switch, if it has one."""

    memory: int = 1024
    second: str = ""

    BOOT_SECONDS = 600

    @property
    def _interfaces(self) -> list[tuple[str, str, str, str]]:
        """(name inside, MAC address, tap, switch)."""
        found = [(self.interface, "p", f"b{self.number}")] + [(self.second, "q", "br1")] * bool(self.second)
        return [
            (name, f"52:54:00:00:{i:02x}:{self.number:02x}", f"{tap}{self.number}", switch)
            for i, (name, tap, switch) in enumerate(found)
        ]

    def prepare(
        self, base: Path, hostname: str, password_hash: str, online: bool, pip: str, servers: list[str]
    ) -> str:
        known = super().prepare(base, hostname, password_hash, online, pip, servers)
        for name, mac, _, _ in self._interfaces:
            text = f"[Match]\nMACAddress={mac}\n\n[Link]\nName={name}\n"
            self._write(base, f"etc/systemd/network/10-{name}.link", text)
        self._write(base, "usr/local/lib/lab-door.py", Path(door.__file__).read_text())
        unit = self._write(base, "etc/systemd/system/lab-door.service", DOOR_UNIT)
        wants = unit.parent / "multi-user.target.wants"
        wants.mkdir()
        (wants / unit.name).symlink_to(f"../{unit.name}")
        return known

    # --- on and off --------------------------------------------------------------------------------------------------

    def start(self, base: Path, hostname: str, binds: list[Path]) -> None:
        """Switch it on. It belongs to no terminal and outlives this process."""
        folder = image(base)
        disk = self.disk / "disk.qcow2"
        folders = [path for path in binds if path.is_dir()]
        if not disk.exists():
            run("qemu-img", "create", "-q", "-f", "qcow2", "-F", "raw", "-b", folder / "disk", disk)
            self._bring_along(base, binds)
        command = [
            *("qemu-system-x86_64", *ACCELERATORS[accelerator(folder)], "-smp", "2", "-m", str(self.memory)),
            *("-no-user-config", "-nodefaults", "-display", "none", "-serial", "stdio"),
            *("-kernel", folder / "kernel", "-initrd", folder / "initrd"),
            *("-append", "root=/dev/vda rw console=ttyS0"),
            *("-drive", f"file={disk},format=qcow2,if=virtio", "-device", "virtio-rng-pci"),
            *_shared("itself", self.disk / "upper"),
            *(word for i, path in enumerate(folders) for word in _shared(f"folder{i}", path)),
        ]
        for _, mac, tap, _ in self._interfaces:
            command += ["-netdev", f"tap,id={tap},ifname={tap},script=no,downscript=no"]
            command += ["-device", f"virtio-net-pci,netdev={tap},mac={mac},romfile="]
        command += ["-device", "virtio-serial-pci"]
        for name in (f"door.{i}" for i in range(door.PORTS)):
            command += ["-chardev", f"socket,id={name},path={self.state / name},server=on,wait=off"]
            command += ["-device", f"virtserialport,chardev={name},name={name}"]
        environment = {
            "WIRES": " ".join(f"{tap}:{switch}" for _, _, tap, switch in self._interfaces),
            "RUN_PROCS": " ".join(map(str, self.group.procs_files("run"))),
        }
        self._launch(self.network.enter("sh", "-c", LAUNCH, "launch", *command), environment)

    def _bring_along(self, base: Path, binds: list[Path]) -> None:
        """This machine's package folders are mounted at the same path; of single files each host gets a copy."""
        fstab = "/dev/vda / ext4 errors=remount-ro 0 1\n"
        for i, path in enumerate(path for path in binds if path.is_dir()):
            where = str(path).replace("\\", r"\134").replace(" ", r"\040")
            fstab += f"folder{i} {where} 9p ro,trans=virtio,version=9p2000.L,msize=262144 0 0\n"
        self._write(base, "etc/fstab", fstab)
        for path in (path for path in binds if path.is_file()):
            self._write(base, str(path.relative_to("/")), path.read_text())

    # --- inside ------------------------------------------------------------------------------------------------------

    def enter(self, *argv: str) -> list[str]:
        """The command line that runs ARGV inside as root."""
        if not self.running():
            raise self.is_off()
        return [sys.executable, "-I", door.__file__, str(self.state), *argv]

    def shell(self) -> list[str]:
        return self.enter("--tty", "bash", "-l")


def _shared(tag: str, path: Path) -> list[str]:
    """A folder of this machine that the virtual one can mount, to read only."""
    where = str(path).replace(",", ",,")
    return ["-virtfs", f"local,path={where},mount_tag={tag},security_model=none,readonly=on"]

"""By what NVIDIA's graphics cards are known on the PCI bus, and which of them no run can have."""

from __future__ import annotations

NVIDIA = "10de"  # the vendor
DISPLAY = ("0300", "0302")  # classes: VGA controller; 3D controller, which has no output
# How the drivers' names end that hold a card for a virtual machine: KVM's, Grace Hopper's own (nvgrace-gpu-vfio-pci),
# Xen's.
UNUSABLE = ("vfio-pci", "pci-stub", "pciback")

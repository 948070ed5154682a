"""Free memory of a process in a control group, such as that of a container."""

from pathlib import Path

import pytest
import torch

from cutaway import device

pytestmark = pytest.mark.unchecked


def write_group(root: Path, limit: str, used: int) -> None:
    name = Path("/proc/self/cgroup").read_text(encoding="ascii").rpartition("::")[2].strip().lstrip("/")
    group = root / name
    group.mkdir(parents=True, exist_ok=True)
    (group / "memory.max").write_text(f"{limit}\n")
    (group / "memory.current").write_text(f"{used}\n")
    (group / "memory.stat").write_text("anon 100\nactive_file 30\ninactive_file 20\n")


def test_memory_limit_of_the_control_group(tmp_path: Path) -> None:
    assert device._cgroup_available_memory(tmp_path) is None
    write_group(tmp_path, "max", 500)
    assert device._cgroup_available_memory(tmp_path) is None
    write_group(tmp_path, "1000", 500)
    assert device._cgroup_available_memory(tmp_path) == 550
    write_group(tmp_path, "1000", 1200)
    assert device._cgroup_available_memory(tmp_path) == 0


def test_free_memory_is_within_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "_cgroup_available_memory", lambda: 1234)
    assert device.free_memory(torch.device("cpu")) == 1234
    monkeypatch.setattr(device, "_cgroup_available_memory", lambda: None)
    assert (device.free_memory(torch.device("cpu")) or 0) > 1234

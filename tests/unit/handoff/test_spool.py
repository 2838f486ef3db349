import os
import resource
import shutil
import subprocess
import sys
import zlib
from pathlib import Path

import pytest

from vime.handoff.ledger_types import Task
from vime.handoff.spool import Fsync, Spool, SpoolFullError, SpoolReader
from vime.handoff.spool_format import HEADER, SpoolDamageError
from vime.types import HandoffError

ROOT = Path(__file__).resolve().parents[3]


def task(group, attempt=1):
    return Task("train", group, attempt)


def data(group, size=50):
    return bytes((group + at) % 251 for at in range(size))


def fill(directory, groups, **options):
    spool = Spool(directory, **options)
    spool.append([(task(group), data(group)) for group in groups])
    spool.close()


def held(reader):
    return [entry.group for entry, _, _ in reader.entries()]


@pytest.mark.parametrize("fsync", Fsync)
def test_what_was_appended_is_read_back_also_by_another_process_and_after_reopening(tmp_path, fsync):
    spool = Spool(tmp_path, fsync=fsync)
    reader = SpoolReader(tmp_path)
    checksums = spool.append([(task(0), data(0)), (task(1), b"")])
    spool.append([(Task("eval/x y", 1, 2), data(2))])
    assert checksums == [zlib.crc32(data(0)), 0]
    assert held(reader) == []
    reader.refresh()
    spool.close()
    for found in (reader, SpoolReader(tmp_path)):
        assert [found.read(t, c) for t, c, _ in found.entries()] == [data(0), b"", data(2)]
        assert [t for t, _, _ in found.entries()] == [task(0), task(1), Task("eval/x y", 1, 2)]


def test_what_a_thread_appends_while_the_records_are_listed_comes_with_the_next_list(tmp_path):
    spool = Spool(tmp_path)
    spool.append([(task(group), data(group)) for group in range(3)])
    listed = []
    for entry, _, _ in spool.entries():
        listed.append(entry.group)
        spool.append([(task(entry.group + 10), data(entry.group))])
    assert listed == [0, 1, 2]
    assert held(spool) == [0, 1, 2, 10, 11, 12]


def test_a_second_delivery_is_not_written_twice_and_other_bytes_of_one_task_stay_apart(tmp_path):
    spool = Spool(tmp_path)
    [first] = spool.append([(task(0), b"first")])
    size = spool.num_bytes
    assert spool.append([(task(0), b"first")]) == [first]
    assert spool.num_bytes == size
    [other] = spool.append([(task(0), b"other")])  # an orphan of a crash may share the task: the checksum tells
    assert (spool.read(task(0), first), spool.read(task(0), other)) == (b"first", b"other")
    with pytest.raises(HandoffError, match=f"it holds .'{first:08x}'"):
        spool.read(task(0), 12345)
    with pytest.raises(HandoffError, match="none of this group"):
        spool.read(task(7), 12345)


def test_a_second_writer_is_refused(tmp_path):
    spool = Spool(tmp_path)
    with pytest.raises(HandoffError, match="another process writes"):
        Spool(tmp_path)
    spool.close()
    Spool(tmp_path).close()


def test_a_tail_cut_at_any_byte_is_dropped_and_the_rest_stays(tmp_path):
    fill(tmp_path / "whole", [0, 1])
    spool = Spool(tmp_path / "whole")
    [(_, _, _), (_, _, last)] = spool.entries()
    spool.close()
    [segment] = (tmp_path / "whole").glob("*.vsp")
    stored = segment.read_bytes()
    assert len(stored) == last.end
    for end in range(last.end):
        directory = tmp_path / f"cut-{end}"
        directory.mkdir()
        (directory / segment.name).write_bytes(stored[:end])
        whole = [0] if end >= last.offset else []
        assert held(SpoolReader(directory)) == whole
        spool = Spool(directory)
        assert held(spool) == whole
        spool.append([(task(9), data(9))])
        spool.close()
        assert held(SpoolReader(directory)) == [*whole, 9]


def test_a_tail_of_zeros_after_a_power_cut_is_dropped(tmp_path):
    fill(tmp_path, [0])
    [segment] = tmp_path.glob("*.vsp")
    with segment.open("ab") as file:
        file.write(bytes(5000))
    spool = Spool(tmp_path)
    assert held(spool) == [0]
    spool.close()
    assert held(SpoolReader(tmp_path)) == [0]


def test_damage_before_the_last_record_is_an_error_that_names_file_offset_and_group(tmp_path):
    fill(tmp_path / "whole", [0, 1, 2])
    places = {t.group: place for t, _, place in SpoolReader(tmp_path / "whole").entries()}
    [segment] = (tmp_path / "whole").glob("*.vsp")
    stored = segment.read_bytes()
    for at in range(len(HEADER), places[2].offset):
        damaged = bytearray(stored)
        damaged[at] ^= 0x40
        segment.write_bytes(damaged)
        group = 0 if at < places[1].offset else 1
        for opening in (Spool, SpoolReader):
            with pytest.raises(SpoolDamageError) as caught:
                opening(tmp_path / "whole")
            assert (caught.value.path, caught.value.offset) == (segment, places[group].offset)
            assert ("first" if group == 0 else "train/0#1") in caught.value.group
        assert segment.read_bytes() == damaged  # nothing is cut off


def test_damage_at_the_end_of_an_earlier_segment_is_an_error(tmp_path):
    fill(tmp_path, [0, 1], segment_bytes=10)
    fill(tmp_path, [2])
    first, *_ = sorted(tmp_path.glob("*.vsp"))
    os.truncate(first, first.stat().st_size - 1)
    with pytest.raises(SpoolDamageError, match="the record is cut off"):
        Spool(tmp_path)


def test_bytes_that_change_after_opening_are_noticed_when_they_are_read(tmp_path):
    spool = Spool(tmp_path)
    [checksum] = spool.append([(task(0), data(0))])
    [(_, _, place)] = spool.entries()
    with place.path.open("r+b") as file:
        file.seek(place.payload_offset)
        file.write(b"x")
    with pytest.raises(SpoolDamageError, match=r"group train/0#1: its payload changed"):
        spool.read(task(0), checksum)


def test_another_format_and_another_file_are_refused(tmp_path):
    (tmp_path / "segment-00000001.vsp").write_bytes(HEADER[:-1] + b"\x01" + b"rest")
    with pytest.raises(HandoffError, match="format 1, this Vime knows 2"):
        SpoolReader(tmp_path)
    (tmp_path / "segment-00000001.vsp").write_bytes(b"something else")
    with pytest.raises(SpoolDamageError, match="not as a spool segment"):
        SpoolReader(tmp_path)


def test_segments_go_when_nothing_in_them_is_needed(tmp_path):
    spool = Spool(tmp_path, segment_bytes=150)  # a record takes 32 + 17 + 50 bytes, so two are in a segment
    reader = SpoolReader(tmp_path)
    for group in range(7):
        spool.append([(task(group), data(group))])
    reader.refresh()
    assert len(spool.segments()) == 4
    freed = spool.compact(lambda entry, checksum: entry.group == 3)
    assert freed > 200
    assert held(spool) == [2, 3, 6]  # the newest segment stays
    assert spool.compact(lambda entry, checksum: entry.group == 3) == 0
    spool.append([(task(7), data(7))])  # in a new segment: nothing in the old newest one was needed
    assert spool.compact(lambda entry, checksum: entry.group in (3, 7)) > 0
    reader.refresh()
    assert held(spool) == held(reader) == [2, 3, 7]
    assert [reader.read(t, c) for t, c, _ in reader.entries()] == [data(2), data(3), data(7)]
    spool.close()
    assert held(Spool(tmp_path)) == [2, 3, 7]


def test_names_of_segments_are_never_used_twice(tmp_path):
    reader = SpoolReader(tmp_path)
    for group in range(5):
        spool = Spool(tmp_path)
        spool.append([(task(group), data(group, size=100 - 10 * group))])
        spool.compact(lambda entry, checksum: False)
        spool.close()
        reader.refresh()
        assert held(reader)[-1] == group


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 256 KiB; where mounting is not allowed, the limit of a process on the size of a file."""
    place = tmp_path / "disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(place)]
    is_mounted = shutil.which("mount") is not None and subprocess.run(command, capture_output=True).returncode == 0
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if not is_mounted:
        resource.setrlimit(resource.RLIMIT_FSIZE, (256 << 10, before[1]))
    yield place
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    if is_mounted:
        subprocess.run(["umount", "-l", str(place)], check=True)


def test_a_full_disk_is_refused_before_anything_is_acknowledged(small_disk):
    spool = Spool(small_disk / "spool", fsync=Fsync.COMMIT)
    stored = []

    def fill_up():
        for group in range(0, 200, 2):
            spool.append([(task(group), data(group, 5000)), (task(group + 1), data(group, 5000))])
            stored.extend([group, group + 1])

    with pytest.raises(SpoolFullError, match="Nothing of them counts"):
        fill_up()
    assert 10 < len(stored) < 60
    assert held(spool) == held(SpoolReader(spool.directory)) == stored
    with pytest.raises(SpoolFullError):
        spool.append([(task(999), data(1, 20_000))])
    spool.append([(task(1000), b"small")])  # what still fits is taken
    spool.close()
    assert held(SpoolReader(small_disk / "spool")) == [*stored, 1000]


WRITER = """
import sys
from vime.handoff.ledger_types import Task
from vime.handoff.spool import Spool
spool = Spool(__import__("pathlib").Path(sys.argv[1]), fsync="never", segment_bytes=20_000)
first = max((task.group for task, _, _ in spool.entries()), default=-1) + 1
for group in range(first, first + 100_000):
    spool.append([(Task("train", group, 1), bytes([group % 251]) * (group * 37 % 3000))])
    sys.stdout.write(f"{group}\\n")
    sys.stdout.flush()
"""


def test_a_killed_writer_loses_nothing_that_it_acknowledged(tmp_path):
    acknowledged = -1
    for wanted in (3, 40, 11, 200, 90):  # acknowledged records to wait for before SIGKILL
        with subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, cwd=ROOT, text=True
        ) as writer:
            for _ in range(wanted):
                acknowledged = int(writer.stdout.readline())
            writer.kill()
            rest = writer.stdout.read().splitlines()
            acknowledged = int(rest[-1]) if rest and rest[-1].isdigit() else acknowledged
        reader = SpoolReader(tmp_path)
        assert held(reader)[: acknowledged + 1] == list(range(acknowledged + 1))
        for entry, checksum, _ in reader.entries():
            assert reader.read(entry, checksum) == bytes([entry.group % 251]) * (entry.group * 37 % 3000)

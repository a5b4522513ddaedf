# SPDX-License-Identifier: Apache-2.0
from banyan.mounts import holds, mounted, short_lock, type_of

TABLE = r"""/dev/sda1 / ext4 rw 0 0
tmpfs /mnt/my\040drive tmpfs rw 0 0
#/dev/sdb1 /none xfs rw 0 0

fuse /mnt/my\134disk fuse.hf3fs rw 0 0
"""


def test_table_when_points_have_spaces_then_they_are_as_people_name_them():
    assert list(mounted(TABLE)) == [("/", "ext4"), ("/mnt/my drive", "tmpfs"), ("/mnt/my\\disk", "fuse.hf3fs")]


def test_type_when_mounts_lie_in_each_other_then_that_of_the_nearest():
    assert type_of(TABLE, "/mnt/my drive/kv") == "tmpfs" and type_of(TABLE, "/mnt/my drives") == "ext4"
    assert type_of("", "/mnt") == "unknown" and holds("/", "/mnt") and not holds("/mnt", "/mnts")


def test_locks_when_an_option_of_the_nearest_mount_keeps_them_on_this_machine_then_it_is_named():
    table = """server:/kv /mnt/nfs nfs rw,vers=3,nolock,local_lock=all 0 0
server:/kv /mnt/nfs/deep nfs4 rw,local_lock=none 0 0
server:/kv /mnt/flock nfs rw,local_lock=flock 0 0
mgs:/kv /mnt/lustre lustre rw,localflock,lazystatfs 0 0
fstab /mnt/short ext4
"""
    named = {point: short_lock(table, f"/mnt/{point}/kv") for point in ("nfs", "nfs/deep", "flock", "lustre", "short")}
    assert named == {"nfs": "nolock", "nfs/deep": "", "flock": "local_lock=flock", "lustre": "localflock", "short": ""}

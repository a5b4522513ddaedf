// SPDX-License-Identifier: Apache-2.0
//! How much memory there still is: the least of what the machine and the control groups around this process leave.

use std::fs;
use std::path::Path;

/// `None` if neither the machine nor a group says.
pub fn available_bytes() -> Option<u64> {
    let groups = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let group = group_bytes(Path::new("/sys/fs/cgroup"), &groups);
    machine_bytes().into_iter().chain(group).min()
}

fn machine_bytes() -> Option<u64> {
    let text = fs::read_to_string("/proc/meminfo").ok()?;
    let line = text
        .lines()
        .find(|line| line.starts_with("MemAvailable:"))?;
    let kib: u64 = line.split_ascii_whitespace().nth(1)?.parse().ok()?;
    Some(kib * 1024)
}

/// What one kind of control groups calls its figures.
struct Kind {
    folder: &'static str,
    limit: &'static str,
    used: &'static str,
    /// Cached files, of the group and of those inside it.
    cached: [&'static str; 2],
}

const UNIFIED: Kind = Kind {
    folder: "",
    limit: "memory.max",
    used: "memory.current",
    cached: ["active_file", "inactive_file"],
};

const LEGACY: Kind = Kind {
    folder: "memory",
    limit: "memory.limit_in_bytes",
    used: "memory.usage_in_bytes",
    cached: ["total_active_file", "total_inactive_file"],
};

/// The least that a group of this process, or one around it, leaves. `memberships` is the text of /proc/self/cgroup.
fn group_bytes(root: &Path, memberships: &str) -> Option<u64> {
    memberships
        .lines()
        .filter_map(|line| {
            let (controllers, path) = line.split_once(':')?.1.split_once(':')?;
            let kind = match controllers {
                "" => UNIFIED,
                named if named.split(',').any(|name| name == "memory") => LEGACY,
                _ => return None,
            };
            let top = root.join(kind.folder);
            // In a container the path may be that of the host, which is not there: the top is then the container's own group.
            Path::new(path.trim_start_matches('/'))
                .ancestors()
                .filter_map(|inner| kind.left_bytes(&top.join(inner)))
                .min()
        })
        .min()
}

impl Kind {
    fn left_bytes(&self, group: &Path) -> Option<u64> {
        let read = |file| fs::read_to_string(group.join(file)).ok();
        let number = |text: String| text.trim().parse::<u64>().ok();
        let limit = read(self.limit).and_then(number)?;
        let used = read(self.used).and_then(number)?;
        let cached = read("memory.stat").map_or(0, |stat| self.cached_bytes(&stat));
        Some(limit.saturating_sub(used.saturating_sub(cached)))
    }

    /// What the usage counts but the kernel would drop: cached files, without shared memory (which is on the anonymous lists).
    fn cached_bytes(&self, stat: &str) -> u64 {
        stat.lines()
            .filter_map(|line| line.split_once(' '))
            .filter(|(name, _)| self.cached.contains(name))
            .filter_map(|(_, bytes)| bytes.parse::<u64>().ok())
            .sum()
    }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;

    /// A folder of its own, removed with it.
    struct Groups(PathBuf);

    impl Groups {
        fn new(name: &str) -> Self {
            let folder = format!("banyan-groups-{name}-{}", std::process::id());
            Self(std::env::temp_dir().join(folder))
        }

        fn put(&self, group: &str, files: &[(&str, &str)]) -> &Self {
            let folder = self.0.join(group);
            fs::create_dir_all(&folder).unwrap();
            for (name, text) in files {
                fs::write(folder.join(name), text).unwrap();
            }
            self
        }
    }

    impl Drop for Groups {
        fn drop(&mut self) {
            drop(fs::remove_dir_all(&self.0));
        }
    }

    #[test]
    fn file_cache_when_shared_memory_is_listed_too_then_left_out() {
        let stat =
            "anon 5\nfile 700\nshmem 400\ninactive_anon 400\nactive_file 100\ninactive_file 200\n";
        assert_eq!(UNIFIED.cached_bytes(stat), 300);
    }

    #[test]
    fn group_when_one_around_it_leaves_less_then_that() {
        let groups = Groups::new("nested");
        groups
            .put(
                "pod",
                &[("memory.max", "1000\n"), ("memory.current", "900\n")],
            )
            .put(
                "pod/engine",
                &[("memory.max", "max\n"), ("memory.current", "800\n")],
            );
        assert_eq!(group_bytes(&groups.0, "0::/pod/engine\n"), Some(100));
    }

    #[test]
    fn group_when_its_path_is_the_hosts_then_the_top_is_asked() {
        let groups = Groups::new("container");
        groups.put("", &[("memory.max", "50\n"), ("memory.current", "20\n")]);
        assert_eq!(group_bytes(&groups.0, "0::/host/pod\n"), Some(30));
    }

    #[test]
    fn group_when_it_is_of_the_older_kind_then_its_own_names_are_read() {
        let groups = Groups::new("legacy");
        groups.put(
            "memory/box",
            &[
                ("memory.limit_in_bytes", "700\n"),
                ("memory.usage_in_bytes", "600\n"),
                ("memory.stat", "inactive_file 1\ntotal_inactive_file 40\n"),
            ],
        );
        assert_eq!(
            group_bytes(&groups.0, "7:cpu:/box\n4:memory:/box\n"),
            Some(140)
        );
    }

    #[test]
    fn group_when_nothing_is_limited_then_nothing_is_said() {
        let groups = Groups::new("free");
        groups.put("", &[("memory.max", "max\n")]);
        assert_eq!(group_bytes(&groups.0, "0::/\n"), None);
    }
}

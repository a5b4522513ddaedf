// SPDX-License-Identifier: Apache-2.0
//! What may have happened to the files of a store. Some harm keeps checksums right, as no accident does: what decodes is no more to be
//! relied on.

use std::ffi::CString;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};

use banyan_store::format::{ENTRY_BYTES, Entry, FileHeader, FileKind};
use banyan_store::geometry::BLOCK_BYTES;

/// SplitMix64: the same on every machine.
pub struct Dice(pub u64);

impl Dice {
    pub fn roll(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        (mixed ^ (mixed >> 31)) % bound.max(1)
    }

    fn pick<'a, T>(&mut self, among: &'a [T]) -> &'a T {
        &among[self.roll(among.len() as u64) as usize]
    }

    /// Small, large or any.
    fn number(&mut self) -> u64 {
        let any = self.roll(u64::MAX);
        *self.pick(&[
            0,
            1,
            2,
            any % 64,
            any % 4096,
            u32::MAX.into(),
            u64::from(u32::MAX / 2),
            u64::MAX,
            any,
        ])
    }
}

#[derive(Debug)]
pub enum Harm {
    Flip {
        path: PathBuf,
        at: u64,
        mask: u8,
    },
    Cut {
        path: PathBuf,
        len: u64,
    },
    Fill {
        path: PathBuf,
        at: u64,
        len: u64,
        byte: u8,
    },
    Copy {
        from: PathBuf,
        to: PathBuf,
    },
    Swap {
        one: PathBuf,
        other: PathBuf,
    },
    Remove {
        path: PathBuf,
    },
    Link {
        path: PathBuf,
        to: PathBuf,
    },
    HardLink {
        path: PathBuf,
        to: PathBuf,
    },
    Fifo {
        path: PathBuf,
    },
    Directory {
        path: PathBuf,
    },
    Mode {
        path: PathBuf,
        mode: u32,
    },
    Header {
        path: PathBuf,
        kind: FileKind,
        word: u64,
        value: u64,
    },
    Line {
        path: PathBuf,
        line: u64,
        word: u64,
        value: u64,
    },
}

fn below(directory: &Path, found: &mut Vec<PathBuf>) {
    let Ok(entries) = fs::read_dir(directory) else {
        return;
    };
    for entry in entries.flatten() {
        let is_directory = entry.file_type().is_ok_and(|kind| kind.is_dir());
        if is_directory {
            below(&entry.path(), found);
        }
        found.push(entry.path());
    }
}

fn named(paths: &[PathBuf], part: &str) -> Vec<PathBuf> {
    let has_part = |path: &&PathBuf| {
        path.file_name()
            .is_some_and(|name| name.to_string_lossy().starts_with(part))
    };
    paths.iter().filter(has_part).cloned().collect()
}

impl Harm {
    pub fn draw(dice: &mut Dice, paths: &[PathBuf], outside: &Path) -> Self {
        let mut there = Vec::new();
        paths.iter().for_each(|path| below(path, &mut there));
        there.sort();
        let all = there.clone();
        let manifests = named(&all, "manifest-");
        let segments = named(&all, "segment-");
        let path = match dice.roll(4) {
            0 if !manifests.is_empty() => dice.pick(&manifests).clone(),
            1 if !segments.is_empty() => dice.pick(&segments).clone(),
            _ if !all.is_empty() => dice.pick(&all).clone(),
            _ => paths[0].join("STORE"),
        };
        let len = fs::symlink_metadata(&path).map_or(0, |data| data.len());
        let at = match dice.roll(2) {
            0 => dice.roll(len.min(2 * BLOCK_BYTES as u64)),
            _ => dice.roll(len),
        };
        let other = if all.is_empty() {
            path.clone()
        } else {
            dice.pick(&all).clone()
        };
        let planted = Self::name(dice, paths, &all);
        match dice.roll(16) {
            0..3 => Self::Flip {
                path,
                at,
                mask: 1 << dice.roll(8),
            },
            3 => Self::Cut { path, len: at },
            4 => Self::Cut {
                path,
                len: len + dice.roll(1 << 20),
            },
            5 => Self::Fill {
                path,
                at,
                len: dice.roll(8192),
                byte: dice.roll(256) as u8,
            },
            6 => Self::Copy {
                from: other,
                to: planted,
            },
            7 => Self::Swap { one: path, other },
            8 => Self::Remove { path },
            9 => Self::Link {
                path: planted,
                to: outside.into(),
            },
            10 => Self::HardLink {
                path: planted,
                to: outside.into(),
            },
            11 => match dice.roll(3) {
                0 => Self::Fifo { path: planted },
                1 => Self::Directory { path: planted },
                _ => Self::Mode {
                    path,
                    mode: *dice.pick(&[0o777, 0o666, 0o700, 0o400, 0]),
                },
            },
            12 | 13 => {
                let kind = *dice.pick(&[FileKind::Manifest, FileKind::Segment]);
                let among = if kind == FileKind::Manifest {
                    &manifests
                } else {
                    &segments
                };
                let path = if among.is_empty() {
                    path
                } else {
                    dice.pick(among).clone()
                };
                Self::Header {
                    path,
                    kind,
                    word: dice.roll(4),
                    value: dice.number(),
                }
            }
            _ => {
                let path = if manifests.is_empty() {
                    path
                } else {
                    dice.pick(&manifests).clone()
                };
                Self::Line {
                    path,
                    line: dice.roll(40),
                    word: dice.roll(7),
                    value: dice.number(),
                }
            }
        }
    }

    /// A name that means something to the store.
    fn name(dice: &mut Dice, paths: &[PathBuf], there: &[PathBuf]) -> PathBuf {
        let shelves: Vec<PathBuf> = named(there, "shelf-")
            .into_iter()
            .filter(|path| path.is_dir())
            .collect();
        let shelf = if shelves.is_empty() || dice.roll(4) == 0 {
            dice.pick(paths)
                .join(format!("shelf-{:016x}", dice.roll(u64::MAX)))
        } else {
            dice.pick(&shelves).clone()
        };
        let (number, any) = (dice.roll(8), dice.number());
        let inside = [
            "lock".into(),
            format!("new-manifest-{number}"),
            "new-segment".into(),
            "probe".into(),
            format!("manifest-{number}"),
            format!("manifest-{any}"),
            format!("segment-{number:06}"),
            format!("segment-{:06}", any as u32),
        ];
        match dice.roll(6) {
            0 => shelf,
            1 => dice.pick(paths).join(dice.pick(&[
                "STORE",
                "lock",
                "new-STORE",
                "traffic",
                "shelf-zz",
                "shelf-1",
            ])),
            _ => shelf.join(dice.pick(&inside)),
        }
    }

    pub fn does(&self) -> io::Result<()> {
        match self {
            Self::Flip { path, at, mask } => {
                let file = writable(path)?;
                let mut byte = [0];
                file.read_exact_at(&mut byte, *at)?;
                file.write_all_at(&[byte[0] ^ mask], *at)
            }
            Self::Cut { path, len } => writable(path)?.set_len(*len),
            Self::Fill {
                path,
                at,
                len,
                byte,
            } => writable(path)?.write_all_at(&vec![*byte; *len as usize], *at),
            Self::Copy { from, to } => copy(from, to),
            Self::Swap { one, other } => {
                let between = one.with_extension("between");
                fs::rename(one, &between)?;
                drop(fs::rename(other, one));
                fs::rename(&between, other)
            }
            Self::Remove { path } if path.is_dir() => fs::remove_dir_all(path),
            Self::Remove { path } => fs::remove_file(path),
            Self::Link { path, to } => symlink(to, free(path)?),
            Self::HardLink { path, to } => fs::hard_link(to, free(path)?),
            Self::Fifo { path } => {
                let name = CString::new(free(path)?.as_os_str().as_bytes())?;
                // SAFETY: a terminated name.
                match unsafe { libc::mkfifo(name.as_ptr(), 0o600) } {
                    0 => Ok(()),
                    _ => Err(io::Error::last_os_error()),
                }
            }
            Self::Directory { path } => fs::create_dir(free(path)?),
            Self::Mode { path, mode } => {
                if path.is_symlink() {
                    return Ok(());
                }
                fs::set_permissions(path, fs::Permissions::from_mode(*mode))
            }
            Self::Header {
                path,
                kind,
                word,
                value,
            } => reseal_header(path, *kind, *word, *value),
            Self::Line {
                path,
                line,
                word,
                value,
            } => reseal_line(path, *line, *word, *value),
        }
    }
}

/// Never what lies outside.
fn writable(path: &Path) -> io::Result<File> {
    let found = fs::symlink_metadata(path)?;
    let is_alone = found.is_file() && std::os::unix::fs::MetadataExt::nlink(&found) == 1;
    if !is_alone {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    OpenOptions::new().read(true).write(true).open(path)
}

/// The same name, with nothing there and its directory made.
fn free(path: &Path) -> io::Result<&Path> {
    if let Some(directory) = path.parent() {
        fs::create_dir_all(directory)?;
    }
    if path.is_dir() && !path.is_symlink() {
        fs::remove_dir_all(path)?;
    } else {
        drop(fs::remove_file(path));
    }
    Ok(path)
}

fn copy(from: &Path, to: &Path) -> io::Result<()> {
    if from == to || to.starts_with(from) || from.starts_with(to) {
        return Ok(());
    }
    let found = fs::symlink_metadata(from)?;
    if found.is_dir() {
        fs::create_dir_all(free(to)?)?;
        for entry in fs::read_dir(from)? {
            let entry = entry?;
            copy(&entry.path(), &to.join(entry.file_name()))?;
        }
        return Ok(());
    }
    if !found.is_file() {
        return Ok(());
    }
    fs::copy(from, free(to)?).map(drop)
}

/// Another number in a header, and its checksum right.
fn reseal_header(path: &Path, kind: FileKind, word: u64, value: u64) -> io::Result<()> {
    let file = writable(path)?;
    let mut block = vec![0; BLOCK_BYTES];
    file.read_exact_at(&mut block, 0)?;
    let Some(mut header) = FileHeader::decode(kind, &block) else {
        return Ok(());
    };
    match word {
        0 => header.shelf = value,
        1 => header.number = value,
        2 => header.sequence = value,
        _ => header.places_per_segment = value as u32,
    }
    file.write_all_at(&header.encode(kind), 0)
}

fn reseal_line(path: &Path, line: u64, word: u64, value: u64) -> io::Result<()> {
    let file = writable(path)?;
    let mut block = vec![0; BLOCK_BYTES];
    file.read_exact_at(&mut block, 0)?;
    let Some(header) = FileHeader::decode(FileKind::Manifest, &block) else {
        return Ok(());
    };
    let at = BLOCK_BYTES as u64 + line * ENTRY_BYTES as u64;
    let mut bytes = [0; ENTRY_BYTES];
    file.read_exact_at(&mut bytes, at)?;
    let Some(mut entry) = Entry::decode(header.number, &bytes) else {
        return Ok(());
    };
    match word {
        0 => entry.sequence = value,
        1 => entry.place = value as u32,
        2 => entry.record.identity.generation = value,
        3 => entry.record.identity.key[0] = value,
        4 => entry.record.identity.namespace[0] = value,
        5 => entry.record.parent = entry.record.identity.key,
        _ => entry.record.checksum = value,
    }
    entry.encode(header.number, &mut bytes);
    file.write_all_at(&bytes, at)
}

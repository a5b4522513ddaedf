// SPDX-License-Identifier: Apache-2.0
//! A store opens only what is its user's own: what somebody else has put in its way is refused, passed over, and never followed.

mod rig;

use std::ffi::CString;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use banyan_store::check;
use banyan_store::directory::Stripe;
use banyan_store::store::{Options, Store};
use rig::{Rig, Scratch, options};

fn set_mode(path: &Path, mode: u32) {
    fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
}

fn make_fifo(path: &Path) {
    let name = CString::new(path.as_os_str().as_bytes()).unwrap();
    // SAFETY: a terminated name.
    assert_eq!(unsafe { libc::mkfifo(name.as_ptr(), 0o600) }, 0);
}

fn refusal(options: &Options) -> String {
    let started = Instant::now();
    let refused = Store::open(options).err().expect("refused").to_string();
    assert!(
        started.elapsed() < Duration::from_secs(20),
        "it waited: {refused}"
    );
    assert_eq!(refused.lines().count(), 1, "{refused}");
    refused
}

fn shelf_of(store: &Path) -> PathBuf {
    let entries = fs::read_dir(store).unwrap();
    let mut paths = entries.map(|entry| entry.unwrap().path());
    paths.find(|path| path.is_dir()).unwrap()
}

#[test]
fn directory_when_others_may_write_it_then_refused_with_the_way_out() {
    let scratch = Scratch::new();
    let options = options(scratch.path());
    drop(Rig::open(&options));
    set_mode(&options.paths[0], 0o777);
    let words = refusal(&options);
    assert!(
        words.contains("others may write it") && words.contains("chmod go-w"),
        "{words}"
    );
    set_mode(&options.paths[0], 0o755);
    drop(Rig::open(&options));
}

#[test]
fn directory_when_it_belongs_to_another_user_then_refused_with_both_users() {
    let scratch = Scratch::new();
    let options = options(scratch.path());
    drop(Rig::open(&options));
    let store = &options.paths[0];
    if fs::metadata(store).unwrap().uid() != 0 {
        // Only root can give a directory away. Somebody else's is at hand: root's is taken, if it is private to root.
        let roots = Options {
            paths: vec!["/etc".into()],
            ..options
        };
        refusal(&roots);
        return;
    }
    std::os::unix::fs::chown(store, Some(65534), None).unwrap();
    let words = refusal(&options);
    assert!(
        words.contains("belongs to user 65534") && words.contains("chown"),
        "{words}"
    );
}

#[test]
fn link_when_planted_as_a_shelf_then_what_it_names_stays_and_the_store_opens() {
    let scratch = Scratch::new();
    let options = options(scratch.path());
    Rig::open(&options).keep(None, &[0, 1]);
    let victim = scratch.path().join("victim");
    fs::create_dir(&victim).unwrap();
    fs::write(victim.join("precious"), b"x").unwrap();
    let planted = options.paths[0].join("shelf-00000000000000aa");
    symlink(&victim, &planted).unwrap();
    let rig = Rig::open(&options);
    assert_eq!(rig.fetch(&[0, 1], 1), []);
    rig.keep(Some(1), &[2]);
    drop(rig);
    let stripe = Stripe::open(&options.paths).unwrap();
    check::remove_idle(&stripe).unwrap();
    assert!(victim.join("precious").exists() && planted.is_symlink());
}

#[test]
fn shelf_when_others_may_write_it_then_its_records_are_not_believed() {
    let scratch = Scratch::new();
    let options = options(scratch.path());
    Rig::open(&options).keep(None, &[0, 1]);
    set_mode(&shelf_of(&options.paths[0]), 0o777);
    let rig = Rig::open(&options);
    assert_eq!((rig.num_found(&[0]), rig.stat("adopted_pages")), (0, 0));
    rig.keep(None, &[0]);
}

#[test]
fn shelf_when_one_of_its_files_cannot_be_opened_then_passed_over_and_a_later_start_makes_no_third()
{
    for name in ["segment-000000", "manifest-1", "new-manifest-2", "lock"] {
        let scratch = Scratch::new();
        let options = options(scratch.path());
        Rig::open(&options).keep(None, &[0, 1]);
        let path = shelf_of(&options.paths[0]).join(name);
        drop(fs::remove_file(&path));
        fs::create_dir(&path).unwrap();
        for page in 2..4 {
            let rig = Rig::open(&options);
            assert_eq!(rig.stat("adopted_pages"), page - 2, "{name}");
            rig.keep(None, &[page]);
            assert_eq!(rig.fetch(&[page], 1), []);
        }
        let stripe = Stripe::open(&options.paths).unwrap();
        assert_eq!(stripe.shelves().unwrap().len(), 2);
        let found = check::survey(&stripe).unwrap();
        let is_new = |report: &check::ShelfReport| report.num_records == 2;
        assert!(found.shelves.iter().any(is_new), "{name}");
    }
}

#[test]
fn files_when_they_are_links_then_nothing_elsewhere_is_read_or_written() {
    for name in [
        "lock",
        "shelf/lock",
        "shelf/new-manifest-2",
        "shelf/new-segment",
        "shelf/segment-000001",
    ] {
        let scratch = Scratch::new();
        let options = options(scratch.path());
        Rig::open(&options).keep(None, &[0, 1]);
        let shelf = shelf_of(&options.paths[0]);
        let path = match name.strip_prefix("shelf/") {
            Some(name) => shelf.join(name),
            None => options.paths[0].join(name),
        };
        drop(fs::remove_file(&path));
        let victim = scratch.path().join("victim");
        fs::write(&victim, b"precious").unwrap();
        // A second name of a file would be written through as a link is.
        fs::hard_link(&victim, scratch.path().join("second")).unwrap();
        for is_hard in [false, true] {
            drop(fs::remove_file(&path));
            if is_hard {
                fs::hard_link(&victim, &path).unwrap();
            } else {
                symlink(&victim, &path).unwrap();
            }
            if let Ok(store) = Store::open(&options) {
                drop(store.sync());
            }
            assert_eq!(fs::read(&victim).unwrap(), b"precious", "{name} {is_hard}");
        }
    }
}

#[test]
fn files_when_they_are_fifos_then_an_opening_waits_for_nobody() {
    for name in [
        "STORE",
        "lock",
        "shelf/lock",
        "shelf/manifest-9",
        "shelf/segment-000000",
        "shelf/segment-000001",
    ] {
        let scratch = Scratch::new();
        let options = options(scratch.path());
        Rig::open(&options).keep(None, &[0, 1]);
        let path = match name.strip_prefix("shelf/") {
            Some(name) => shelf_of(&options.paths[0]).join(name),
            None => options.paths[0].join(name),
        };
        drop(fs::remove_file(&path));
        make_fifo(&path);
        let started = Instant::now();
        if let Ok(store) = Store::open(&options) {
            drop(store.sync());
        }
        assert!(started.elapsed() < Duration::from_secs(20), "{name}");
    }
}

#[test]
fn path_when_an_empty_directory_that_others_may_look_into_then_a_store_is_made_there() {
    let scratch = Scratch::new();
    let made = scratch.path().join("kv");
    fs::create_dir(&made).unwrap();
    set_mode(&made, 0o755);
    let wanted = Options {
        paths: vec![made],
        ..options(scratch.path())
    };
    Rig::open(&wanted).keep(None, &[0]);
}

#[test]
fn paths_when_looked_at_ahead_then_refused_as_when_opened_and_nothing_is_made() {
    let scratch = Scratch::new();
    let options = options(scratch.path());
    let store = &options.paths[0];
    Stripe::preview(&options.paths).unwrap();
    assert!(!store.exists());
    drop(Rig::open(&options));
    Stripe::preview(&options.paths).unwrap();
    set_mode(store, 0o777);
    let words = Stripe::preview(&options.paths).unwrap_err().to_string();
    assert_eq!(words, refusal(&options));
    let (file, other) = (scratch.path().join("file"), scratch.path().join("other"));
    fs::write(&file, "").unwrap();
    for path in [&file, &file.join("below")] {
        let words = Stripe::preview(std::slice::from_ref(path))
            .unwrap_err()
            .to_string();
        assert!(
            words.contains("no directory") && words.contains("name one"),
            "{words}"
        );
    }
    fs::create_dir(&other).unwrap();
    fs::write(other.join("notes"), "").unwrap();
    let words = Stripe::preview(std::slice::from_ref(&other))
        .unwrap_err()
        .to_string();
    assert!(words.contains("not empty"), "{words}");
}

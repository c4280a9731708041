//! The house is as it says: layers, sizes, and pages that list what there is.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on panics")]

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use turnhost_protocol::frame::input;

/// The longest file that is still one room.
const MAX_LINES: usize = 700;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// Each Rust file below `folder`, with its text.
fn sources(folder: &str) -> Vec<(PathBuf, String)> {
    let mut found = Vec::new();
    let mut folders = vec![root().join(folder)];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(&folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                let text = std::fs::read_to_string(&path).unwrap();
                found.push((path, text));
            }
        }
    }
    assert!(!found.is_empty(), "{folder} has no sources");
    found
}

/// The floor of a room in the host; imports go down only.
fn floor(room: &str) -> u32 {
    match room {
        "main" | "lib" => 9,
        "config" => 8,
        "input" => 7,
        "life" => 6,
        "turn" => 5,
        "agent" => 4,
        "tools" => 3,
        "session" => 2,
        "output" | "pool" | "timers" | "cancel" | "log" => 1,
        other => panic!("the room `{other}` has no floor; give it one here and in host/src/lib.rs"),
    }
}

#[test]
fn imports_of_the_host_only_go_down() {
    let source = root().join("host/src");
    for (path, text) in sources("host/src") {
        let inside = path.strip_prefix(&source).unwrap();
        let first = inside.iter().next().unwrap().to_str().unwrap();
        let room = first.strip_suffix(".rs").unwrap_or(first);
        for (at, _) in text.match_indices("crate::") {
            let name: String = text[at + "crate::".len()..]
                .chars()
                .take_while(|letter| letter.is_ascii_lowercase() || *letter == '_')
                .collect();
            assert!(
                name == room || floor(&name) < floor(room),
                "{} imports crate::{name}, which is not below it",
                path.display()
            );
        }
    }
}

#[test]
fn host_and_supervisor_do_not_know_each_other() {
    for (folder, other) in [("host", "turnhost-supervisor"), ("supervisor", "turnhost")] {
        let manifest = std::fs::read_to_string(root().join(folder).join("Cargo.toml")).unwrap();
        let depends = manifest.lines().any(|line| {
            line.split(['.', ' ', '=']).next() == Some(other) && !line.starts_with("name")
        });
        assert!(!depends, "{folder} depends on {other}");
    }
    let protocol = std::fs::read_to_string(root().join("protocol/Cargo.toml")).unwrap();
    assert!(
        !protocol.contains("turnhost."),
        "protocol stands below both"
    );
}

#[test]
fn no_room_is_crowded() {
    for folder in ["protocol/src", "host/src", "supervisor/src"] {
        for (path, text) in sources(folder) {
            let lines = text.lines().count();
            assert!(
                lines <= MAX_LINES,
                "{} has {lines} lines: split it",
                path.display()
            );
            assert!(
                (text.starts_with("//!") || text.starts_with("#![doc")),
                "{} does not say what it is",
                path.display()
            );
        }
    }
}

#[test]
fn every_frame_is_in_the_page_of_the_protocol() {
    let page = std::fs::read_to_string(root().join("protocol/README.md")).unwrap();
    let output = std::fs::read_to_string(root().join("protocol/src/frame/output.rs")).unwrap();
    let mut types: BTreeSet<&str> = output
        .split("#[serde(rename = \"")
        .skip(1)
        .map(|rest| rest.split('"').next().unwrap())
        .collect();
    assert!(types.len() >= 20, "{types:?}");
    types.extend(input::TYPES);
    for kind in types {
        assert!(
            page.contains(&format!("`{kind}`")),
            "protocol/README.md lacks `{kind}`"
        );
    }
}

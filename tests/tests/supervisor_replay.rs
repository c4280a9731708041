//! The transcripts again, with a supervisor between gateway and host.

use std::path::Path;
use std::process::Command;

use turnhost_tests::binary;

#[test]
fn every_transcript_is_followed_through_the_supervisor() {
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fixtures");
    let files = ["captures", "by_hand"].into_iter().flat_map(|folder| {
        let entries = std::fs::read_dir(fixtures.join(folder)).expect("the fixtures");
        entries.map(|entry| entry.expect("a fixture").path())
    });
    let output = Command::new(binary::supervisor())
        .arg("replay")
        .arg("--host")
        .arg(binary::turnhost())
        .args(files)
        .output()
        .expect("the supervisor can be started");
    assert!(
        output.status.success(),
        "{}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
}

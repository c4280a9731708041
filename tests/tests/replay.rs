//! The fixtures, played by the real supervisor's player against the real host.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on panics")]

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::OnceLock;

/// `target/<profile>`, with both programs built: the test program itself lies in `deps` below it.
fn programs() -> &'static Path {
    static FOLDER: OnceLock<PathBuf> = OnceLock::new();
    FOLDER.get_or_init(|| {
        let own = std::env::current_exe().unwrap();
        let deps = own
            .ancestors()
            .find(|folder| folder.ends_with("deps"))
            .unwrap();
        let folder = deps.parent().unwrap();
        let profile = match folder.file_name().unwrap().to_str().unwrap() {
            "debug" => "dev",
            other => other,
        };
        let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
        // The whole workspace, so that features are those of this build and nothing is built twice.
        let built = Command::new(cargo)
            .args([
                "build",
                "--workspace",
                "--quiet",
                "--profile",
                profile,
                "--target-dir",
            ])
            .arg(folder.parent().unwrap())
            .args(["--bin", "turnhost", "--bin", "turnhost-supervisor"])
            .current_dir(env!("CARGO_MANIFEST_DIR"))
            .status()
            .unwrap();
        assert!(built.success(), "the programs were not built: {built}");
        folder.to_owned()
    })
}

fn supervisor(args: &[&str]) -> Command {
    let mut command = Command::new(programs().join("turnhost-supervisor"));
    command.args(args);
    command
}

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../fixtures")
        .join(name)
}

fn fixtures(folder: &str) -> Vec<PathBuf> {
    let entries = fs::read_dir(fixture(folder)).unwrap();
    entries.map(|entry| entry.unwrap().path()).collect()
}

fn told(output: &Output) -> String {
    let text = |bytes| String::from_utf8_lossy(bytes).into_owned();
    format!(
        "{}\n{}{}",
        output.status,
        text(&output.stdout),
        text(&output.stderr)
    )
}

#[test]
fn the_host_follows_every_fixture() {
    let mut files = [fixtures("captures"), fixtures("by_hand")].concat();
    files.sort();
    assert!(files.len() >= 29, "{files:?}");
    // The default host is the one beside the supervisor.
    let output = supervisor(&["replay", "--bare"])
        .args(&files)
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", told(&output));
    let lines = String::from_utf8_lossy(&output.stdout).lines().count();
    assert_eq!(lines, files.len(), "{}", told(&output));
}

#[test]
fn a_wrong_expectation_is_found() {
    let folder = tempfile::tempdir().unwrap();
    let wrong = folder.path().join("wrong.jsonl");
    let echo = fs::read_to_string(fixture("by_hand/echo.jsonl")).unwrap();
    fs::write(
        &wrong,
        echo.replace("\"message_count\": 2", "\"message_count\": 3"),
    )
    .unwrap();
    let output = supervisor(&["replay", "--bare"])
        .arg(&wrong)
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(1), "{}", told(&output));
    assert!(
        told(&output).contains("message_count  3         2\n"),
        "{}",
        told(&output)
    );
}

#[test]
fn a_recorded_session_replays() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| {
        folder
            .path()
            .join(name)
            .into_os_string()
            .into_string()
            .unwrap()
    };
    let (file, script, home) = (path("made.jsonl"), path("script.json"), path("home"));
    let turns = r#"{"turns": [[{"delta": "a "}, {"sleep_ms": 60000}], [{"delta": "b "}]]}"#;
    fs::write(&script, turns).unwrap();
    let host = programs()
        .join("turnhost")
        .into_os_string()
        .into_string()
        .unwrap();
    let mut recorder = supervisor(&["record", &file, "--", &host])
        .args(["--home", &home, "--script", &script, "--workers", "2"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut input = recorder.stdin.take().unwrap();
    let mut output = BufReader::new(recorder.stdout.take().unwrap()).lines();
    let mut wait_for = |mark: &str| output.any(|line| line.unwrap().contains(mark));
    assert!(wait_for("hello"));
    let start = r#"{"type": "turn.start", "sid": "s1", "request_id": "r1", "text": "x"}"#;
    writeln!(input, "{start}").unwrap();
    assert!(wait_for("message.delta"));
    writeln!(input, r#"{{"type": "interrupt", "sid": "s1"}}"#).unwrap();
    assert!(wait_for("turn.end"));
    writeln!(
        input,
        r#"{{"type": "turn.start", "sid": "s1", "text": "y"}}"#
    )
    .unwrap();
    assert!(wait_for("turn.end"));
    drop(input);
    assert!(recorder.wait().unwrap().success());

    let made = fs::read_to_string(&file).unwrap();
    assert!(!made.contains(folder.path().to_str().unwrap()), "{made}");
    let output = supervisor(&["replay", "--bare", &file]).output().unwrap();
    assert!(output.status.success(), "{}{made}", told(&output));
}

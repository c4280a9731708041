//! The commands `replay`, `record` and `routes` as a person meets them: exit codes and words.
//!
//! The hosts here are a few words of shell; the real one plays the fixtures in the package
//! `turnhost-tests`.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on panics")]

use std::fs;
use std::io::{Read, Write};
use std::path::PathBuf;
use std::process::{Command, Stdio};

use expect_test::{Expect, expect};
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

const HELLO: &str = r#"{"type":"hello","host_pid":1,"home":"/h","host_ns":1}"#;

/// What a command has done.
struct Done {
    code: Option<i32>,
    stdout: String,
    stderr: String,
}

fn command(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_turnhost-supervisor"));
    command
        .args(args)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command
}

fn supervisor(args: &[&str], input: &str) -> Done {
    let mut child = command(args).spawn().unwrap();
    let mut stdin = child.stdin.take().unwrap();
    let input = input.to_owned();
    // A command that ends early does not read its input.
    let writer = std::thread::spawn(move || drop(stdin.write_all(input.as_bytes())));
    let output = child.wait_with_output().unwrap();
    writer.join().unwrap();
    Done {
        code: output.status.code(),
        stdout: String::from_utf8(output.stdout).unwrap(),
        stderr: String::from_utf8(output.stderr).unwrap(),
    }
}

/// A folder with one fixture, whose host is a shell script.
struct Case {
    folder: TempDir,
}

impl Case {
    fn new(host: &str, lines: &str) -> Self {
        let case = Self {
            folder: TempDir::new().unwrap(),
        };
        let host =
            serde_json::to_string(&host.replace("HELLO", &format!("echo '{HELLO}'"))).unwrap();
        let text = format!("{{\"host\": {{\"args\": [\"-c\", {host}]}}}}\n{lines}\n");
        fs::write(case.file(), text).unwrap();
        case
    }

    fn file(&self) -> String {
        self.path("case.jsonl")
            .into_os_string()
            .into_string()
            .unwrap()
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn replay(&self, flags: &[&str]) -> Done {
        let file = self.file();
        let args = [&["replay", "--bare", "--host", "/bin/sh", &file], flags].concat();
        let done = supervisor(&args, "");
        let here = self.folder.path().to_str().unwrap();
        let known = |text: String| {
            let text = text.replace(here, "FOLDER");
            text.lines()
                .map(without_seconds)
                .collect::<Vec<_>>()
                .join("\n")
        };
        Done {
            stdout: known(done.stdout),
            stderr: known(done.stderr),
            ..done
        }
    }
}

/// `line` without the time that a play took.
fn without_seconds(line: &str) -> String {
    match line.rsplit_once(", ") {
        Some((before, after)) if after.ends_with(" s") => format!("{before}, … s"),
        _ => line.to_owned(),
    }
}

#[track_caller]
fn check(done: &Done, code: i32, expected: Expect) {
    expected.assert_eq(&format!("{}{}", done.stdout, done.stderr));
    assert_eq!(done.code, Some(code));
}

#[test]
fn a_host_that_does_as_it_should_is_good() {
    let case = Case::new(
        "HELLO; read line; echo \"$line\"; exit 3",
        r#"{"out": {"type": "hello"}}
{"in": {"type":"note","request_id":"r1","host_ns":1}}
{"out": {"type":"note","request_id":"r1","host_ns":1}, "exact": true}
{"exit": 3}"#,
    );
    check(&case.replay(&[]), 0, expect!["ok    case  0 turns, … s"]);
}

#[test]
fn what_the_host_has_named_goes_into_what_is_sent() {
    let ask = r#"{"type":"rpc","sid":"s1","message":{"id":"a\"b"},"host_ns":1}"#;
    let case = Case::new(
        &format!(r#"HELLO; printf '%s\n' '{ask}'; read -r line; printf '%s\n' "$line""#),
        r#"{"out": {"type": "hello"}}
{"event": {"sid": "s1", "type": "message.start"}, "optional": true, "why": "not sent"}
{"out": {"type": "rpc", "sid": "s1", "message": {"id": "<id:q>"}}}
{"in": {"type":"answer","id":"<id:q>","host_ns":1}}
{"out": {"type": "answer", "id": "<id:q>"}}
{"exit": 0}"#,
    );
    check(&case.replay(&[]), 0, expect!["ok    case  0 turns, … s"]);
}

#[test]
fn a_wrong_expectation_is_told_field_by_field() {
    let answer = r#"{"type":"note","request_id":"r1","host_ns":2,"a":{"b":[1,2]}}"#;
    let case = Case::new(
        &format!("HELLO; echo a log >&2; read line; echo '{answer}'"),
        r#"{"out": {"type": "hello"}}
{"in": {"type":"question","request_id":"r1"}}
{"differs": "§4: words for the reader"}
{"out": {"type": "note", "request_id": "r1", "a": {"b": [1, 3]}, "c": "<text>"}}
{"exit": 0}"#,
    );
    check(
        &case.replay(&[]),
        1,
        expect![[r#"
        FAIL  case  0 turns, … s
          FOLDER/case.jsonl:5: another frame came in its place
          line  {"out": {"type": "note", "request_id": "r1", "a": {"b": [1, 3]}, "c": "<text>"}}
          got   {"type":"note","request_id":"r1","host_ns":2,"a":{"b":[1,2]}}
          note  §4: words for the reader
            field   expected  got
            a.b[1]  3         2
            c       <text>    no such field
          last sent
            > {"type":"question","request_id":"r1"}
          last received
            < {"type":"hello","host_pid":1,"home":"/h","host_ns":1}
            < {"type":"note","request_id":"r1","host_ns":2,"a":{"b":[1,2]}}
          stderr of the host
            | a log"#]],
    );
    let report: serde_json::Value = serde_json::from_str(&case.replay(&["--json"]).stdout).unwrap();
    assert_eq!(report["ok"], false);
    assert_eq!(report["failure"]["line"], 5);
    assert_eq!(report["failure"]["mismatches"][0]["path"], "a.b[1]");
}

#[test]
fn every_other_way_to_fail_is_told() {
    let check = |host: &str, line: &str, expected: Expect| {
        let lines = format!("{{\"out\": {{\"type\": \"hello\"}}}}\n{line}");
        let done = Case::new(host, &lines).replay(&[]);
        let told = done.stdout.lines().nth(1).unwrap_or(&done.stdout);
        expected.assert_eq(told.trim_start_matches("  FOLDER/case.jsonl:"));
        assert_eq!(done.code, Some(1), "{}", done.stderr);
    };
    let note = "{\"out\": {\"type\": \"note\"}, \"within_ms\": 50}\n{\"exit\": 0}";
    check(
        "HELLO; sleep 60",
        note,
        expect!["3: nothing that fits came within 0.05 s"],
    );
    check(
        "HELLO",
        note,
        expect!["3: the host ended before this came: exit code 0"],
    );
    check(
        "HELLO; exit 2",
        r#"{"exit": 0}"#,
        expect!["3: the host ended with exit code 2, not with exit code 0"],
    );
    check(
        "HELLO; kill -9 $$",
        r#"{"exit": "TERM"}"#,
        expect!["3: the host ended with signal KILL, not with signal TERM"],
    );
    check(
        "HELLO; sleep 60",
        r#"{"exit": 0, "within_ms": 50}"#,
        expect!["3: the host has not ended in time"],
    );
    check(
        "HELLO; echo '{\"type\":\"x\",\"host_ns\":1}'",
        r#"{"exit": 0}"#,
        expect!["3: frames came that no line expects: 1; the first one"],
    );
    check(
        "HELLO; echo oops",
        r#"{"exit": 0}"#,
        expect!["3: the host wrote a bad line: not JSON: expected value at line 1 column 1"],
    );
    check(
        "HELLO; printf oops",
        r#"{"exit": 0}"#,
        expect!["3: cannot read from the host: it ended in the middle of a line: oops"],
    );
    let unread = "{\"in_parts\": [{\"repeat\": \"x\", \"count\": 1000000}]}\n{\"exit\": 0}";
    check(
        "HELLO; exec <&-; sleep 60",
        unread,
        expect!["3: cannot write to the host: Broken pipe (os error 32)"],
    );
}

#[test]
fn a_bad_fixture_is_named_and_nothing_is_started() {
    let bad = Case::new("", "{\"exit\": 0}\n{\"in\": {}}");
    let worse = Case::new("", "{\"outt\": {}}");
    let files = [bad.file(), worse.file(), "/no/such.jsonl".to_owned()];
    let [first, second, third] = files.each_ref().map(String::as_str);
    let done = supervisor(
        &[
            "replay", "--bare", "--host", "/no/host", first, second, third,
        ],
        "",
    );
    assert_eq!(done.code, Some(2));
    let told: Vec<_> = done.stderr.lines().collect();
    assert!(told[0].starts_with(&format!("turnhost-supervisor: {first}:3: nothing but")));
    assert!(
        told[1].starts_with(&format!("{second}:2: a line has one verb")),
        "{}",
        told[1]
    );
    assert!(
        told[2].starts_with("/no/such.jsonl: cannot read the fixture"),
        "{}",
        told[2]
    );
}

#[test]
fn without_a_host_there_is_no_play() {
    let file = Case::new("", "{\"exit\": 0}");
    let path = file.file();
    let done = supervisor(&["replay", "--bare", "--host", "/no/such/host", &path], "");
    check(
        &done,
        69,
        expect![[r#"
        turnhost-supervisor: cannot start the host /no/such/host: No such file or directory (os error 2); name another one with --host
    "#]],
    );
    // A supervisor that finds no host says so itself, and ends.
    let done = supervisor(&["replay", "--host", "/no/such/host", &path], "");
    assert_eq!(done.code, Some(1));
    assert!(
        done.stdout.contains("cannot start the host /no/such/host"),
        "{}",
        done.stdout
    );
}

#[test]
fn each_play_has_a_fresh_home() {
    // The shell has `--home DIR` as $0 and $1.
    let host = r#"HELLO; stat -c %a "$1" >&2; ls "$1" >&2; touch "$1/x"; exit 1"#;
    let case = Case::new(host, "{\"out\": {\"type\": \"hello\"}}\n{\"exit\": 0}");
    for _ in 0..2 {
        let done = case.replay(&[]);
        assert!(
            done.stdout.ends_with("stderr of the host\n    | 700"),
            "{}",
            done.stdout
        );
    }
    let home = case.path("home");
    fs::create_dir(&home).unwrap();
    assert_eq!(
        case.replay(&["--home", home.to_str().unwrap()]).code,
        Some(1)
    );
    assert!(home.join("x").exists());
}

#[test]
fn the_routes_are_printed() {
    check(
        &supervisor(&["routes"], ""),
        0,
        expect![[r#"
        prompt.submit           turn-path
        session.interrupt       turn-path
        reload.mcp              run-concurrent
        session.save            run-concurrent
        session.compress        idle-gated
        prompt.submit.truncate  idle-gated
        slash.model             idle-gated
        slash.personality       idle-gated
        slash.prompt            idle-gated
        slash.compress          idle-gated
        session.reset           idle-gated
        session.history.reload  idle-gated
        slash.retry             idle-gated
    "#]],
    );
    let done = supervisor(&["routes", "--json"], "");
    let table: serde_json::Value = serde_json::from_str(&done.stdout).unwrap();
    assert_eq!(table.as_object().unwrap().len(), 13);
    assert_eq!(table["slash.retry"], "idle-gated");
}

#[test]
fn a_recording_is_a_relay_that_replays() {
    let case = Case::new("", "");
    let file = case.file();
    let input = "{\"type\":\"note\", \"request_id\":\"r1\",\"host_ns\":5}\n";
    let host = format!("echo '{HELLO}'; cat; exit 4");
    let done = supervisor(
        &[
            "record", &file, "--", "/bin/sh", "-c", &host, "--home", "/h",
        ],
        input,
    );
    assert_eq!(done.stdout, format!("{HELLO}\n{input}"));
    assert_eq!((done.code, done.stderr.as_str()), (Some(4), ""));
    let made = fs::read_to_string(&file).unwrap();
    let (host, lines) = made.split_once('\n').unwrap();
    assert!(
        host.starts_with(r#"{"host": {"args": ["-c","#) && !host.contains("--home"),
        "{host}"
    );
    // Whether the hello or the input comes first is up to the two.
    let mut lines: Vec<_> = lines.lines().collect();
    lines.sort_unstable();
    expect![[r#"
        {"close": "stdin"}
        {"exit": 4}
        {"in": {"type":"note", "request_id":"r1","host_ns":5}}
        {"out": {"type":"hello","host_pid":"<pid>","home":"<path>"}}
        {"out": {"type":"note","request_id":"r1"}}"#]]
    .assert_eq(&lines.join("\n"));
    let done = case.replay(&[]);
    assert_eq!(done.code, Some(0), "{}{}", done.stdout, done.stderr);
}

#[test]
fn a_recording_hands_any_bytes_on() {
    let case = Case::new("", "");
    let file = case.file();
    let input = format!("\r\n{}\n\u{feff} no json\ncut", "x".repeat(1 << 20));
    let done = supervisor(&["record", &file, "/bin/sh", "-c", "cat"], &input);
    assert!(
        done.stdout == input,
        "{} of {} bytes",
        done.stdout.len(),
        input.len()
    );
    assert_eq!(done.code, Some(0), "{}", done.stderr);
    let made = fs::read_to_string(&file).unwrap();
    assert!(made.contains("{\"in_text\": \"cut\", \"lf\": false}\n"));
    assert!(made.ends_with("{\"exit\": 0}\n"));
}

#[test]
fn a_recording_that_fails_does_not_stop_the_relay() {
    let input = "x\n".repeat(100_000);
    let full = supervisor(
        &["record", "/dev/full", "--", "/bin/sh", "-c", "cat"],
        &input,
    );
    assert!(full.stdout == input);
    check(
        &Done {
            stdout: String::new(),
            ..full
        },
        1,
        expect![[r#"
            turnhost-supervisor: cannot write /dev/full: No space left on device (os error 28); the recording is not whole
        "#]],
    );
    let nowhere = supervisor(
        &["record", "/no/such/file", "--", "/bin/sh", "-c", "echo x"],
        "",
    );
    check(
        &nowhere,
        2,
        expect![[r#"
        turnhost-supervisor: cannot write the recording /no/such/file: No such file or directory (os error 2)
    "#]],
    );
    let no_host = supervisor(&["record", "/dev/null", "--", "/no/such/host"], "");
    check(
        &no_host,
        69,
        expect![[r#"
        turnhost-supervisor: cannot start the host /no/such/host: No such file or directory (os error 2)
    "#]],
    );
}

#[test]
fn a_host_that_ends_first_ends_the_recording() {
    let case = Case::new("", "");
    let file = case.file();
    let host = "sleep 60 > /dev/null 2>&1 & kill -9 $$";
    let mut recorder = command(&["record", &file, "/bin/sh", "-c", host])
        .spawn()
        .unwrap();
    // The input stays open until here.
    let stdin = recorder.stdin.take();
    assert_eq!(recorder.wait().unwrap().code(), Some(137));
    drop(stdin);
    assert!(
        fs::read_to_string(&file)
            .unwrap()
            .ends_with("{\"exit\": \"KILL\"}\n")
    );
}

#[test]
fn a_signal_is_forwarded_and_recorded() {
    let case = Case::new("", "");
    let file = case.file();
    let host = "trap 'exit 5' TERM; echo ready; while :; do sleep 0.01; done";
    let mut recorder = command(&["record", &file, "/bin/sh", "-c", host])
        .spawn()
        .unwrap();
    let mut ready = [0; 6];
    recorder
        .stdout
        .as_mut()
        .unwrap()
        .read_exact(&mut ready)
        .unwrap();
    kill_process(Pid::from_child(&recorder), Signal::TERM).unwrap();
    assert_eq!(recorder.wait().unwrap().code(), Some(5));
    assert!(
        fs::read_to_string(&file)
            .unwrap()
            .contains("{\"signal\": \"TERM\"}\n")
    );
}

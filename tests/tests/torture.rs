//! SPEC §2: no input, however deep or odd, ends the host or costs another frame.
//!
//! After each hostile line stands a probe, which must be answered, once. The seed of the random
//! part is printed; `TURNHOST_TEST_SEED` repeats it.

use std::fs;
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use fastrand::Rng;
use serde_json::json;
use serde_json::value::RawValue;
use turnhost_tests::{Host, Options, probe, suite};

/// Checks that each probe up to `count` was answered once and that the host still runs.
fn check_probes(host: &Host, count: usize) {
    host.answer(&probe_id(count - 1));
    let mut seen = vec![0_u32; count];
    for frame in host.frames() {
        let number = frame
            .request_id()
            .and_then(|id| id.strip_prefix("probe ")?.parse().ok());
        if let Some(number) = number {
            let number: usize = number;
            seen[number] += 1;
            assert_eq!(frame["message"], "unknown frame type: probe");
        }
    }
    let wrong = seen.iter().position(|answers| *answers != 1);
    assert_eq!(wrong, None, "this probe was not answered once");
    assert!(host.is_running());
}

fn probe_id(number: usize) -> String {
    format!("probe {number}")
}

/// `line` and the probe behind it.
fn with_probe(line: &[u8], number: usize) -> Vec<u8> {
    let probe = probe(&probe_id(number)).to_string();
    [line, b"\n", probe.as_bytes(), b"\n"].concat()
}

#[test]
fn no_text_of_the_suite_costs_another_frame() {
    let cases = suite::parsing_cases();
    assert_eq!(cases.len(), 318);
    let host = Host::start(Options::new());
    for (number, case) in cases.iter().enumerate() {
        host.send_raw(with_probe(&case.bytes, number));
    }
    check_probes(&host, cases.len());
}

#[test]
fn texts_of_the_suite_inside_a_frame_are_told_apart() {
    let cases = suite::parsing_cases();
    let host = Host::start(Options::new());
    let framed = |name: &str, bytes: &[u8]| {
        let head = format!(r#"{{"type":"case","request_id":"{name}","x":"#);
        [head.as_bytes(), bytes, b"}"].concat()
    };
    for (number, case) in cases.iter().enumerate() {
        host.send_raw(with_probe(&framed(&case.name, &case.bytes), number));
    }
    check_probes(&host, cases.len());
    // A case of several lines is several frames, which says nothing of the case.
    let on_one_line =
        |bytes: &[u8]| !bytes.trim_ascii_end().contains(&b'\n') && !bytes.ends_with(b"\n");
    for case in cases.iter().filter(|case| on_one_line(&case.bytes)) {
        let answer = host.answer(&case.name);
        let code = answer["code"].as_str().unwrap_or_default();
        match &case.name[..2] {
            "y_" => assert_eq!(code, "unknown_type", "{}", case.name),
            "n_" => assert_eq!(code, "invalid_json", "{}", case.name),
            _ => assert!(
                ["unknown_type", "invalid_json"].contains(&code),
                "{}",
                case.name
            ),
        }
    }
}

/// What the recordings in `fixtures/captures` send, but for the frame that ends a host.
fn recorded() -> Vec<Vec<u8>> {
    #[derive(serde::Deserialize)]
    struct Line<'a> {
        #[serde(borrow, rename = "in")]
        frame: Option<&'a RawValue>,
    }
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fixtures/captures");
    let mut files: Vec<_> = fs::read_dir(folder)
        .expect("the recordings are there")
        .map(|entry| entry.expect("an entry of a folder").path())
        .collect();
    files.sort();
    let mut frames = Vec::new();
    for file in files {
        let text = fs::read_to_string(file).expect("a recording");
        for line in text.lines() {
            let line: Line<'_> = serde_json::from_str(line).expect("a line of a recording");
            if let Some(frame) = line.frame
                && !frame.get().contains("shutdown")
            {
                frames.push(frame.get().as_bytes().to_vec());
            }
        }
    }
    assert!(frames.len() > 50, "{}", frames.len());
    frames
}

/// A frame of each type, with many fields.
fn written() -> Vec<Vec<u8>> {
    let session = |kind: &str| json!({"type": kind, "sid": "s1", "request_id": "r1"});
    let mut frames = vec![
        json!({"type": "turn.start", "sid": "s1", "request_id": "r1", "session_key": "key-s1",
               "text": "SAY hi there", "history": [{"role": "user", "content": "a"},
               {"role": "assistant", "content": [{"type": "text", "text": "b\u{1F600}\\"}]}],
               "history_version": 2, "cols": 80, "cwd": "/tmp", "source": "tui",
               "model_override": {"model": "m", "provider": "p"}, "attached_images": ["/a.png"],
               "queued_prompt_generation": 3, "turn_id": "t-1", "replace_history": true,
               "active_session_lease": {"lease_id": "l", "session_id": "key-s1"}}),
        json!({"type": "turn.start", "sid": "s2", "request_id": 17, "prompt":
               [{"type": "text", "text": "parts"}, {"type": "image_url", "image_url": {}}]}),
        json!({"type": "turn.start", "sid": "s3", "request_id": null, "text":
               r#"!script [{"delta":"a"},{"reasoning":"b"},{"parallel":[[{"say":"c"}]]}]"#}),
        json!({"type": "respond", "sid": "s1", "request_id": "r2", "params":
               {"frame": {"jsonrpc": "2.0", "id": "srq-0123456789ab", "result": {"choice": "once"}}}}),
        json!({"type": "clarify.lock", "sid": "s1", "request_id": "r3", "params":
               {"request_id": "srq-0123456789ab", "question_id": "q0", "answer": "x"}}),
        json!({"type": "control", "sid": "s1", "request_id": "r4", "route_name": "slash.model",
               "command": "/model x", "session_key": "key-s1"}),
        json!({"type": "hello.ack", "protocol_version": 1, "boot_id": "0123"}),
    ];
    for kind in [
        "interrupt",
        "requests.open",
        "reload_mcp",
        "session.list",
        "session.resume",
        "session.close",
        "idle.probe",
        "no.such.type",
    ] {
        frames.push(session(kind));
    }
    let mut lines: Vec<Vec<u8>> = frames
        .iter()
        .map(|frame| frame.to_string().into_bytes())
        .collect();
    lines.push(b"[1, \"\\ud800\", 1e400, {\"a\": [null]}]".to_vec());
    lines
}

/// Pieces that have broken readers of JSON before.
const ODD: [&[u8]; 18] = [
    b"\0",
    b"\xff",
    b"\xed\xa0\x80",
    b"\xc0\xaf",
    b"\r",
    b"\n",
    b"\\",
    b"\"",
    b"{",
    b"[[[[[[[[",
    b"]",
    b",,",
    b"null",
    b"\\ud800",
    b"\\u0000",
    b"-1e99999",
    b"99999999999999999999999999",
    b"\xef\xbb\xbf",
];

fn mutate(rng: &mut Rng, seeds: &[Vec<u8>]) -> Vec<u8> {
    let mut line = seeds[rng.usize(..seeds.len())].clone();
    for _ in 0..rng.usize(1..5) {
        let at = rng.usize(..=line.len());
        let end = (at + rng.usize(..20)).min(line.len());
        match rng.u8(..7) {
            0 => line.truncate(at),
            1 => drop(line.drain(at..end)),
            2 => drop(line.splice(at..at, ODD[rng.usize(..ODD.len())].iter().copied())),
            3 => drop(line.splice(at..end, ODD[rng.usize(..ODD.len())].iter().copied())),
            4 => {
                let copy = line[at..end].to_vec();
                drop(line.splice(at..at, copy));
            }
            5 => {
                let other = &seeds[rng.usize(..seeds.len())];
                let from = rng.usize(..other.len());
                line.truncate(at);
                line.extend_from_slice(&other[from..]);
            }
            _ => {
                if let Some(byte) = line.get_mut(at) {
                    *byte ^= 1 << rng.u8(..8);
                }
            }
        }
    }
    line
}

#[test]
fn no_mutation_of_a_frame_ends_the_host_or_costs_another_frame() {
    const HOSTS: usize = 8;
    const LINES: usize = 10_000;
    let seed = match std::env::var("TURNHOST_TEST_SEED") {
        Ok(seed) => seed.parse().expect("TURNHOST_TEST_SEED is a number"),
        Err(_) => SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .map_or(0, |since| since.as_secs()),
    };
    println!("TURNHOST_TEST_SEED={seed}");
    let mut rng = Rng::with_seed(seed);
    let seeds = [recorded(), written()].concat();
    for _ in 0..HOSTS {
        let host = Host::start(Options::new().max_frame_bytes(64 * 1024));
        for number in 0..LINES {
            host.send_raw(with_probe(&mutate(&mut rng, &seeds), number));
        }
        check_probes(&host, LINES);
    }
}

#[test]
fn random_bytes_cost_nothing_else() {
    let host = Host::start(Options::new().max_frame_bytes(4096));
    let mut rng = Rng::with_seed(7);
    let count = 2_000;
    for number in 0..count {
        let length = rng.usize(..if number % 100 == 0 { 20_000 } else { 200 });
        let line: Vec<u8> = std::iter::repeat_with(|| rng.u8(..)).take(length).collect();
        host.send_raw(with_probe(&line, number));
    }
    check_probes(&host, count);
}

#[test]
fn a_line_may_come_in_any_pieces() {
    let host = Host::start(Options::new());
    let mut rng = Rng::with_seed(11);
    let lines = written();
    let bytes: Vec<u8> = lines
        .iter()
        .enumerate()
        .flat_map(|(number, line)| with_probe(line, number))
        .collect();
    let mut rest = bytes.as_slice();
    while !rest.is_empty() {
        let (piece, tail) = rest.split_at(rng.usize(1..=7.min(rest.len())));
        host.send_raw(piece);
        rest = tail;
    }
    check_probes(&host, lines.len());
}

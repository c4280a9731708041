//! SPEC §2: lines, limits, broken input, ids, and what a slow parent costs.

use serde_json::{Value, json};
use turnhost_tests::host::Exit;
use turnhost_tests::{Frame, Host, Options, interrupt, probe, script_turn, turn};

const MIB: usize = 1024 * 1024;

/// A line, the type of its one answer, and fields of that answer.
type Case<'a> = (&'a [u8], &'a str, &'a [(&'a str, Value)]);

/// Sends each line with a probe behind it, all to one host, and checks the frames between: exactly
/// one, the expected one.
fn check_all(options: Options, cases: &[Case<'_>]) {
    let host = Host::start(options);
    for (number, (line, kind, fields)) in cases.iter().enumerate() {
        let before = host.frames().len();
        host.send_raw([line, b"\n".as_slice()].concat());
        let probe_id = format!("after line {number}");
        host.ask(&probe(&probe_id));
        let shown = String::from_utf8_lossy(&line[..line.len().min(200)]).into_owned();
        let mut new = host.frames().split_off(before);
        new.retain(|frame| !frame.answers(&probe_id));
        assert_eq!(new.len(), 1, "answers to {shown}: {new:#?}");
        assert_eq!(new[0].kind(), *kind, "{shown}: {}", new[0].line());
        for (field, value) in *fields {
            assert_eq!(&new[0][field], value, "{field} of {}", new[0].line());
        }
    }
}

/// A probe that is `length` bytes long without its line end.
fn probe_of_length(request_id: &str, length: usize) -> Vec<u8> {
    let head = format!(r#"{{"type":"probe","request_id":"{request_id}","pad":""#);
    let tail = r#""}"#;
    let pad = "x".repeat(length - head.len() - tail.len());
    format!("{head}{pad}{tail}").into_bytes()
}

fn delta_texts(frames: &[std::sync::Arc<Frame>]) -> Vec<&str> {
    frames
        .iter()
        .filter(|frame| frame.event() == Some("message.delta"))
        .filter_map(|frame| frame.payload()["text"].as_str())
        .collect()
}

#[test]
fn byte_order_mark_carriage_returns_and_blank_lines_are_ignored() {
    let host = Host::start(Options::new());
    let first = probe("1");
    let second = probe("2");
    host.send_raw(format!(
        "\u{feff}{first}\r\n\n  \t \r\n\r\n{second}\n   \n\t\n"
    ));
    host.ask(&probe("3"));
    let kinds: Vec<_> = host.frames().iter().map(|f| f.kind().to_owned()).collect();
    assert_eq!(kinds, ["hello", "error", "error", "error"]);
    assert_eq!(
        host.answer("1")["message"],
        "unknown frame type: probe",
        "the first line after a byte order mark is a frame"
    );
}

#[test]
fn a_line_may_have_exactly_the_limit() {
    let host = Host::start(Options::new().max_frame_bytes(2048));
    host.send_raw([probe_of_length("at", 2048), b"\n".to_vec()].concat());
    assert_eq!(host.answer("at")["code"], "unknown_type");
    // The line end counts in neither form.
    host.send_raw([probe_of_length("at with CR", 2048), b"\r\n".to_vec()].concat());
    assert_eq!(host.answer("at with CR")["code"], "unknown_type");
    host.send_raw([probe_of_length("over", 2049), b"\n".to_vec()].concat());
    assert_eq!(host.answer("over")["code"], "frame_too_large");
    assert_eq!(host.ask(&probe("next"))["code"], "unknown_type");
}

#[test]
fn the_limit_is_32_mib_by_default() {
    let host = Host::start(Options::new());
    let limit = 32 * MIB;
    host.send_raw([probe_of_length("at", limit), b"\n".to_vec()].concat());
    assert_eq!(host.answer("at")["code"], "unknown_type");
    host.send_raw([probe_of_length("over", limit + 1), b"\n".to_vec()].concat());
    assert_eq!(host.answer("over")["code"], "frame_too_large");
}

#[test]
fn a_longer_line_is_skipped_without_being_kept() {
    let host = Host::start(Options::new().max_frame_bytes(MIB));
    host.ask(&probe("warm"));
    let before = host.peak_mib();
    host.send_raw(r#"{"type":"turn.start","sid":"s","request_id":"long","text":""#);
    let megabyte = vec![b'x'; MIB];
    for _ in 0..128 {
        host.send_raw(megabyte.clone());
    }
    host.send_raw("\"}\n");
    let answer = host.answer("long");
    assert_eq!(
        (answer.kind(), &answer["reason"], answer.sid()),
        ("turn.error", &json!("invalid"), Some("s"))
    );
    let grown = host.peak_mib() - before;
    assert!(grown < 8.0, "a line of 128 MiB cost {grown} MiB");
    host.ask(&probe("next"));
}

#[test]
fn a_line_that_is_no_frame_costs_itself() {
    let not_an_object = [
        ("code", json!("invalid_frame")),
        ("message", json!("frame must be an object")),
    ];
    let invalid_json = [("code", json!("invalid_json"))];
    let known = [
        ("code", json!("invalid_json")),
        ("request_id", json!("r")),
        ("sid", json!("s")),
    ];
    check_all(
        Options::new(),
        &[
            (b"[1]", "error", &not_an_object),
            (br#""text""#, "error", &not_an_object),
            (b"7", "error", &not_an_object),
            (b"null", "error", &not_an_object),
            (b"true", "error", &not_an_object),
            (b"not json", "error", &invalid_json),
            (b"{", "error", &invalid_json),
            (b"}", "error", &invalid_json),
            (b"\xff\xfe", "error", &invalid_json),
            (b"{}{}", "error", &invalid_json),
            (b"\x00", "error", &invalid_json),
            // The id and the session are read where they can be.
            (
                br#"{"type":"interrupt","sid":"s","request_id":"r","#,
                "error",
                &known,
            ),
            (
                b"{\"sid\":\"s\",\"request_id\":\"r\",\"type\":\"x\",\"text\":\"\xff\"}",
                "error",
                &known,
            ),
            (
                br#"{"request_id":"r","sid":"s","deep":[{"a":[1,"]"]}],"bad":tru}"#,
                "error",
                &known,
            ),
            (
                br#"{"sid":7,"request_id":"r","#,
                "error",
                &[("sid", json!("7")), ("request_id", json!("r"))],
            ),
        ],
    );
}

#[test]
fn a_broken_turn_start_ends_its_turn() {
    let refused = [
        ("reason", json!("invalid")),
        ("execution_state", json!("not_started")),
        ("request_id", json!("r")),
        ("sid", json!("s")),
    ];
    let start = br#"{"type":"turn.start","sid":"s","request_id":"r","text":""#;
    let with = |tail: &[u8]| [start.as_slice(), tail].concat();
    check_all(
        Options::new().max_frame_bytes(128 * 1024),
        &[
            (&with(b""), "turn.error", &refused),
            (&with(b"\xff\"}"), "turn.error", &refused),
            (&with(b"\"} x"), "turn.error", &refused),
            (&with(b"\\x\"}"), "turn.error", &refused),
            (&with(&vec![b'x'; 200 * 1024]), "turn.error", &refused),
            (
                br#"{"t\u0079pe":"turn.\u0073tart","sid":"s","request_id":"r","x"#,
                "turn.error",
                &refused,
            ),
        ],
    );
}

#[test]
fn the_look_at_a_broken_line_ends_after_64_kib() {
    let line = |space: usize| {
        let pad = "x".repeat(space);
        format!(r#"{{"type":"probe","pad":"{pad}","request_id":"r","#).into_bytes()
    };
    check_all(
        Options::new(),
        &[
            (&line(60_000), "error", &[("request_id", json!("r"))]),
            (&line(70_000), "error", &[("request_id", Value::Null)]),
        ],
    );
}

#[test]
fn depth_stops_nothing() {
    let nested = |open: &str, close: &str, depth: usize| {
        format!("{}{}", open.repeat(depth), close.repeat(depth))
    };
    let deep_field =
        |value: String| format!(r#"{{"type":"probe","request_id":"r","x":{value}}}"#).into_bytes();
    let answered = [("request_id", json!("r"))];
    check_all(
        Options::new(),
        &[
            (&deep_field(nested("[", "]", 100_000)), "error", &answered),
            (
                &deep_field(format!(
                    "{}1{}",
                    r#"{"a":"#.repeat(100_000),
                    "}".repeat(100_000)
                )),
                "error",
                &answered,
            ),
            ("[".repeat(100_000).as_bytes(), "error", &[]),
            (r#"[{"":"#.repeat(50_000).as_bytes(), "error", &[]),
            (nested("[", "]", 100_000).as_bytes(), "error", &[]),
        ],
    );
}

#[test]
fn history_may_be_deep_and_hold_any_number() {
    let host = Host::start(Options::new());
    let depth = 1000;
    let deep = format!("{}{}", "[".repeat(depth), "]".repeat(depth));
    let digits = "7".repeat(5000);
    host.send_line(&format!(
        r#"{{"type":"turn.start","sid":"s","request_id":"r","text":"hi","history":[{{"role":"user","content":"x","n":{digits},"f":1.50e400,"d":{deep}}}],"new":{deep}}}"#
    ));
    let end = host.answer("r");
    assert_eq!((end.kind(), &end["message_count"]), ("turn.end", &json!(3)));
}

#[test]
fn a_request_id_is_given_back_as_it_came() {
    let host = Host::start(Options::new());
    let digits = "1234567890".repeat(500);
    let ids = [
        "1",
        "-0",
        "1.50",
        "1e400",
        "-1E-999",
        digits.as_str(),
        r#""""#,
        r#""text""#,
        r#""\u00fc \" \\ \n""#,
        r#""\/""#,
        "true",
        "false",
        r#"[1,"x",null,[]]"#,
        r#"{"a":{"b":[1.0]},"a":2}"#,
    ];
    for id in ids {
        host.send_line(&format!(r#"{{"type":"probe","request_id":{id}}}"#));
        host.wait_for(&format!("the answer to {id}"), |frame| {
            frame.request_id_json() == Some(id)
        });
        // A turn gives it back in each of its frames.
        host.send_line(&format!(
            r#"{{"type":"turn.start","sid":"s","request_id":{id},"text":"x"}}"#
        ));
        host.wait_for(&format!("the end of turn {id}"), |frame| {
            frame.kind() == "turn.end" && frame.request_id_json() == Some(id)
        });
    }
}

#[test]
fn a_lone_surrogate_is_replaced_not_refused() {
    let host = Host::start(Options::new());
    host.send_line(r#"{"type":"probe","request_id":"id \ud800"}"#);
    host.answer("id \u{fffd}");
    host.send_line(
        r#"{"type":"turn.start","sid":"s\udc00","request_id":"r","text":"a\ud800b \ud83d\ude00"}"#,
    );
    assert_eq!(host.answer("r").kind(), "turn.end");
    let frames = host.frames_of("s\u{fffd}");
    assert_eq!(delta_texts(&frames).concat(), "a\u{fffd}b \u{1f600}");
}

#[test]
fn a_missing_id_is_made() {
    let host = Host::start(Options::new());
    let is_made = |frame: &Frame| {
        frame["request_id"].as_str().is_some_and(|id| {
            id.len() == 32
                && id
                    .bytes()
                    .all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
        })
    };
    for frame in [
        json!({"type": "probe"}),
        json!({"type": "interrupt", "sid": "nobody"}),
        json!({"type": "idle.probe", "request_id": null}),
        json!({"type": "session.list"}),
        json!({"type": "control", "sid": "s", "route_name": "session.save"}),
    ] {
        let before = host.frames().len();
        host.send(&frame);
        host.ask(&probe(&frame.to_string()));
        let answer = &host.frames()[before];
        assert!(is_made(answer), "{}", answer.line());
    }
    host.send(&json!({"type": "turn.start", "sid": "s", "text": "x"}));
    let end = host.wait_for("turn.end", Frame::is_terminal);
    assert!(is_made(&end), "{}", end.line());
    let id = end["request_id"].as_str().expect("a made id is text");
    let kinds: Vec<_> = host
        .frames_with_id(id)
        .iter()
        .map(|frame| frame.kind().to_owned())
        .collect();
    assert_eq!(kinds, ["turn.accepted", "turn.started", "turn.end"]);
}

#[test]
fn keys_may_be_escaped_repeated_and_in_any_order() {
    let host = Host::start(Options::new());
    for (number, line) in [
        r#"{"text":"x","request_id":"ID","sid":"s","type":"turn.start"}"#,
        r#"{"t\u0079pe":"turn.start","\u0073id":"s","request\u005fid":"ID","text":"x"}"#,
        r#"{"type":"probe","type":"turn.start","sid":"no","sid":"s","request_id":1,"request_id":"ID","text":"y","text":"x"}"#,
        r#" { "type" : "turn.start" , "sid" : "s" , "request_id" : "ID" , "text" : "x" } "#,
    ]
    .into_iter()
    .enumerate()
    {
        let id = format!("r{number}");
        host.send_line(&line.replace("ID", &id));
        let end = host.answer(&id);
        assert_eq!(end.kind(), "turn.end", "{line}");
        assert_eq!(end.sid(), Some("s"), "{line}");
        let complete = host.wait_for("message.complete", |frame| {
            frame.event() == Some("message.complete")
        });
        assert_eq!(complete.payload()["text"], "x", "{line}");
    }
}

#[test]
fn null_means_absent() {
    let host = Host::start(Options::new());
    let end = host.ask(&json!({
        "type": "turn.start", "sid": "s", "request_id": "r", "text": null, "prompt": "p",
        "session_key": null, "history": null, "history_version": null, "replace_history": null,
        "cols": null, "cwd": null, "profile_home": null, "model_override": null,
        "attached_images": null, "queued_prompt_generation": null, "turn_id": null,
        "display_metadata": null, "active_session_lease": null, "pending_model_switch": null,
    }));
    assert_eq!((end.kind(), &end["session_key"]), ("turn.end", &json!("s")));
    assert_eq!(delta_texts(&host.frames_of("s")).concat(), "p");
}

#[test]
fn numbers_are_taken_as_digits_where_text_names_something() {
    let host = Host::start(Options::new());
    let end = host.ask(&json!({
        "type": "turn.start", "sid": 7, "session_key": 12.5, "request_id": "r", "text": "x",
    }));
    assert_eq!(
        (end.kind(), end.sid(), &end["session_key"]),
        ("turn.end", Some("7"), &json!("12.5"))
    );
    let ack = host.ask(&json!({"type": "interrupt", "sid": "7", "request_id": "i"}));
    assert_eq!(ack["applied"], true, "sid 7 and sid \"7\" are one session");
}

#[test]
fn a_wrong_type_names_its_field() {
    let host = Host::start(Options::new());
    let check = |mut frame: Value, field: &str, value: &Value, kind: &str| {
        let id = format!("{field} of {frame}");
        frame[field] = value.clone();
        frame["request_id"] = json!(id);
        let answer = host.ask(&frame);
        let message = answer["message"].as_str().unwrap_or_default();
        assert_eq!(answer.kind(), kind, "{}", answer.line());
        assert!(message.contains(field), "{frame} gives {message:?}");
        answer
    };
    for (field, value) in [
        ("sid", json!(true)),
        ("sid", json!(["s"])),
        ("session_key", json!({})),
        ("text", json!(1)),
        ("prompt", json!(1)),
        ("history", json!("none")),
        ("history", json!({"role": "user"})),
        ("history", json!([1])),
        ("history_version", json!("one")),
        ("replace_history", json!("yes")),
        ("cols", json!("wide")),
        ("cwd", json!(1)),
        ("profile_home", json!([])),
        ("model_override", json!(1)),
        ("attached_images", json!("a.png")),
        ("attached_images", json!([1])),
        ("queued_prompt_generation", json!("abc")),
        ("turn_id", json!({})),
        ("display_metadata", json!([])),
        ("active_session_lease", json!(["a", "b"])),
    ] {
        let frame = json!({"type": "turn.start", "sid": "s"});
        let answer = check(frame, field, &value, "turn.error");
        assert_eq!(answer["reason"], "invalid");
        assert_eq!(answer["execution_state"], "not_started");
    }
    for (kind, field, value, answer_kind) in [
        ("control", "route_name", json!([]), "control.error"),
        ("control", "command", json!({}), "control.error"),
        ("reload_mcp", "sid", json!(false), "control.error"),
        ("respond", "sid", json!(false), "respond.error"),
        ("clarify.lock", "sid", json!([]), "respond.error"),
        ("interrupt", "sid", json!({}), "error"),
        ("interrupt", "queued_prompt_generation", json!("x"), "error"),
        ("session.close", "sid", json!(true), "error"),
        ("shutdown", "wait_ms", json!("soon"), "error"),
        ("shutdown", "wait_ms", json!(-1), "error"),
    ] {
        let answer = check(
            json!({"type": kind, "sid": "s"}),
            field,
            &value,
            answer_kind,
        );
        if answer_kind == "error" {
            assert_eq!(answer["code"], "invalid_frame", "{}", answer.line());
        }
    }
    assert!(
        host.frames_of("s")
            .iter()
            .all(|frame| frame.event().is_none())
    );
}

#[test]
fn an_unknown_type_is_named() {
    check_all(
        Options::new(),
        &[
            (
                br#"{"type":"no.such","request_id":"r"}"#,
                "error",
                &[
                    ("message", json!("unknown frame type: no.such")),
                    ("code", json!("unknown_type")),
                    ("request_id", json!("r")),
                ],
            ),
            (
                br#"{"request_id":"r"}"#,
                "error",
                &[("message", json!("unknown frame type: "))],
            ),
            (
                br#"{"type":7,"request_id":"r"}"#,
                "error",
                &[("message", json!("unknown frame type: 7"))],
            ),
        ],
    );
}

#[test]
fn names_and_ids_have_an_end() {
    let host = Host::start(Options::new());
    let name = |bytes: usize| "n".repeat(bytes);
    assert_eq!(
        host.ask(&turn(&name(4096), "longest sid", "x")).kind(),
        "turn.end"
    );
    let refused = host.ask(&turn(&name(4097), "too long sid", "x"));
    assert_eq!(
        (refused.kind(), &refused["reason"]),
        ("turn.error", &json!("invalid"))
    );
    let longest_id = name(MIB - 2);
    assert_eq!(host.ask(&probe(&longest_id))["code"], "unknown_type");
    host.send(&probe(&name(MIB - 1)));
    host.wait_for("an answer that names the field", |frame| {
        frame.kind() == "error"
            && frame["code"] == "invalid_frame"
            && frame["message"]
                .as_str()
                .is_some_and(|message| message.contains("request_id"))
    });
}

#[test]
fn output_beyond_the_limit_is_cut_and_says_so() {
    let host = Host::start(Options::new().max_frame_bytes(4096));
    let text = "0123456789 ";
    let steps = json!([{"deltas": {"count": 2000, "text": text}}]);
    assert_eq!(host.ask(&script_turn("s", "r", &steps)).kind(), "turn.end");
    let complete = host.wait_event("s", "message.complete");
    assert_eq!(complete.payload()["truncated"], true);
    let shown = complete.payload()["text"].as_str().expect("a text");
    assert!(
        shown.ends_with("[cut]") && shown.starts_with(text),
        "{shown}"
    );
    // One delta that is longer than a line comes as several, whole.
    let long = "ü\u{1}\"".repeat(600);
    let steps = json!([{"delta": long}, {"say": "short"}]);
    let line = script_turn("t", "r2", &steps).to_string();
    assert!(line.len() < 12_000);
    let host = Host::start(Options::new().max_frame_bytes(line.len()));
    host.send_line(&line);
    assert_eq!(host.answer("r2").kind(), "turn.end");
    assert_eq!(delta_texts(&host.frames_of("t")).concat(), long);
}

#[test]
fn a_turn_may_stream_more_than_is_repeated_at_its_end() {
    const COUNT: usize = 20 * 1024;
    let host = Host::start(Options::new());
    let text = "x".repeat(1024);
    let steps = json!([{"deltas": {"count": COUNT, "text": text}}]);
    assert_eq!(host.ask(&script_turn("s", "r", &steps)).kind(), "turn.end");
    let frames = host.frames_of("s");
    let streamed: usize = delta_texts(&frames).iter().map(|text| text.len()).sum();
    assert_eq!(streamed, COUNT * 1024);
    let complete = host.wait_event("s", "message.complete");
    assert_eq!(complete.payload()["truncated"], true);
    let kept = complete.payload()["text"].as_str().map_or(0, str::len);
    assert!((8 * MIB..20 * MIB).contains(&kept), "{kept} bytes");
}

#[test]
fn a_slow_parent_costs_deltas_their_granularity_never_a_frame() {
    const COUNT: usize = 100_000;
    let host = Host::start(Options::new());
    host.stop_reading();
    for sid in ["a", "b"] {
        let steps = json!([
            {"deltas": {"count": COUNT, "text": format!("{sid} ")}},
            {"reasoning": "between"},
            {"delta": "last"},
        ]);
        host.send(&script_turn(sid, sid, &steps));
    }
    // Both turns wait for the parent now.
    host.wait_quiet();
    host.send(&turn("c", "c", "a third session is not held up for good"));
    host.wait_quiet();
    let peak = host.peak_mib();
    assert!(peak < 32.0, "what waits is bounded: {peak} MiB");
    host.read_on();
    for sid in ["a", "b", "c"] {
        assert_eq!(host.answer(sid).kind(), "turn.end");
    }
    for sid in ["a", "b"] {
        let frames = host.frames_of(sid);
        let texts = delta_texts(&frames);
        assert_eq!(texts.concat(), format!("{sid} ").repeat(COUNT) + "last");
        assert!(texts.len() < COUNT, "neighbouring deltas were joined");
        assert!(frames.last().is_some_and(|frame| frame.is_terminal()));
        let story = host.story(sid);
        let place = |kind: &str| story.iter().position(|event| event == kind);
        assert!(place("reasoning.delta") < place("message.complete"));
        assert_eq!(
            story[place("reasoning.delta").expect("it was sent") + 1],
            "message.delta",
            "deltas of two kinds keep their order"
        );
    }
}

#[test]
fn a_parent_that_reads_sees_every_delta() {
    let host = Host::start(Options::new());
    let steps = json!([{"deltas": {"count": 300, "text": "x "}}]);
    host.ask(&script_turn("s", "r", &steps));
    assert_eq!(delta_texts(&host.frames_of("s")), vec!["x "; 300]);
}

#[test]
fn a_parent_that_writes_and_never_reads_is_held_back() {
    const ID_BYTES: usize = 8 * 1024;
    const COUNT: usize = 12_000;
    let host = Host::start(Options::new());
    let id = |number: usize| format!("{number:0>width$}", width = ID_BYTES);
    host.stop_reading();
    let line = probe(&id(0)).to_string().len() as u64 + 1;
    for number in 0..COUNT {
        host.send(&probe(&id(number)));
    }
    host.wait_quiet();
    let taken = host.bytes_sent() / line;
    assert!(
        (7_000..COUNT as u64 - 1_000).contains(&taken),
        "it stops reading at about 64 MiB of unread output: {taken} lines of {ID_BYTES} bytes"
    );
    let peak = host.peak_mib();
    assert!(peak < 128.0, "unread output of 64 MiB takes {peak} MiB");
    host.read_on();
    host.answer(&id(COUNT - 1));
    let ids: Vec<String> = host
        .frames()
        .iter()
        .filter_map(|frame| frame.request_id_json().map(str::to_owned))
        .collect();
    let expected: Vec<String> = (0..COUNT)
        .map(|number| format!("\"{}\"", id(number)))
        .collect();
    assert!(ids == expected, "each is answered once, in order");
    assert_eq!(host.ask(&interrupt("nobody", "after"))["applied"], false);
}

#[test]
fn log_files_are_rotated_and_few() {
    let home = tempfile::tempdir().expect("a temporary folder");
    let logs = home.path().join("logs");
    std::fs::create_dir(&logs).expect("a folder");
    let log = logs.join("turnhost.log");
    let full = vec![b'x'; 10 * MIB];
    for start in 0..8 {
        std::fs::write(&log, &full).expect("a file");
        let mut host = Host::start(Options::new().home(home.path()));
        host.ask(&turn("s", "r", "x"));
        host.close_stdin();
        host.exit();
        let size = std::fs::metadata(&log).expect("a log").len();
        assert!(size < 10 * MIB as u64, "start {start}: {size} bytes");
        assert!(host.log().contains("session finalized"));
    }
    let files = std::fs::read_dir(&logs).expect("a folder").count();
    assert_eq!(files, 6, "the log and five old ones");
}

#[test]
fn a_first_line_that_is_too_long_may_have_a_byte_order_mark() {
    for length in [2_000, 70_000, MIB] {
        let host = Host::start(Options::new().max_frame_bytes(1024));
        let text = "x".repeat(length);
        host.send_raw(format!(
            "\u{feff}{{\"type\":\"turn.start\",\"sid\":\"s\",\"request_id\":\"long\",\"text\":\"{text}\"}}\n"
        ));
        let refused = host.answer("long");
        assert_eq!(
            (refused.kind(), &refused["reason"], refused.sid()),
            ("turn.error", &json!("invalid"), Some("s")),
            "{length} bytes"
        );
        assert_eq!(host.ask(&turn("s", "next", "x")).kind(), "turn.end");
    }
}

#[test]
fn an_input_that_its_parent_made_non_blocking_is_read_to_its_end() {
    let non_blocking = r#"exec python3 -c '
import os, sys
os.set_blocking(0, False)
os.execv(sys.argv[1], sys.argv[1:])' "$@" <&3 3<&-"#;
    let mut host = Host::start(Options::new().shell(non_blocking));
    for number in 0..5 {
        // It has nothing to read now.
        host.wait_quiet();
        let id = format!("r{number}");
        assert_eq!(host.ask(&turn("s", &id, "x")).kind(), "turn.end");
    }
    // A line that comes in more pieces than a pipe holds.
    let line = [probe_of_length("long", 4 * MIB), b"\n".to_vec()].concat();
    host.send_raw(line);
    assert_eq!(host.answer("long")["code"], "unknown_type");
    host.close_stdin();
    assert_eq!(host.exit(), Exit::Code(0));
}

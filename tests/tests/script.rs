//! SPEC §11: the script agent.

use std::io::Write;

use serde_json::{Value, json};
use turnhost_tests::host::Exit;
use turnhost_tests::{Host, Options, interrupt, make_pipe, script, script_turn, turn};

/// What a turn showed: `kind text` for what streams, `kind` for the rest, then the final text.
fn show(host: &Host, sid: &str) -> String {
    let mut shown = String::new();
    for frame in host.frames_of(sid) {
        let line = match frame.event() {
            Some("session.info" | "message.start") | None => continue,
            Some("message.complete") => {
                format!(
                    "{}: {}",
                    frame.payload()["status"].as_str().unwrap_or_default(),
                    frame.payload()["text"].as_str().unwrap_or_default()
                )
            }
            Some(kind) => {
                format!(
                    "{kind} {}",
                    frame.payload()["text"].as_str().unwrap_or_default()
                )
            }
        };
        shown.push_str(line.trim_end());
        shown.push('\n');
    }
    shown
}

/// Plays `prompt` in a session of its own, and compares what it shows.
fn check(host: &Host, prompt: &str, expected: &str) {
    let end = host.ask(&turn(prompt, prompt, prompt));
    assert_eq!(end.kind(), "turn.end", "{}", end.line());
    assert_eq!(show(host, prompt), expected, "{prompt}");
}

#[test]
fn without_steps_the_prompt_is_echoed_word_by_word() {
    let host = Host::start(Options::new());
    check(
        &host,
        "hello big world",
        "message.delta hello\nmessage.delta big\nmessage.delta world\ncomplete: hello big world\n",
    );
    // A word of its own that only looks like the directive is echoed too.
    check(
        &host,
        "!scripts run",
        "message.delta !scripts\nmessage.delta run\ncomplete: !scripts run\n",
    );
}

#[test]
fn each_step_does_what_it_says() {
    let host = Host::start(Options::new());
    let check = |steps: Value, expected: &str| check(&host, &script(&steps), expected);
    check(json!([]), "complete:\n");
    check(
        json!([{"delta": "a"}, {"delta": "b"}]),
        "message.delta a\nmessage.delta b\ncomplete: ab\n",
    );
    check(
        json!([{"deltas": {"count": 3, "text": "x", "every_ms": 1}}]),
        "message.delta x\nmessage.delta x\nmessage.delta x\ncomplete: xxx\n",
    );
    check(
        json!([{"deltas": {"count": 2, "text": "x"}}, {"deltas": {"count": 0, "text": "y"}}]),
        "message.delta x\nmessage.delta x\ncomplete: xx\n",
    );
    check(
        json!([{"reasoning": "why"}, {"delta": "a"}]),
        "reasoning.delta why\nmessage.delta a\ncomplete: a\n",
    );
    check(
        json!([{"delta": "streamed"}, {"sleep_ms": 1}, {"say": "said"}]),
        "message.delta streamed\ncomplete: said\n",
    );
    check(json!([{"say": "only said"}]), "complete: only said\n");
    // Nothing answered before: the last result is null.
    check(json!([{"say": "<$last>"}]), "complete: <null>\n");
    check(
        json!([{"parallel": [[{"sleep_ms": 1}], []]}, {"say": "$last"}]),
        "complete: [null,null]\n",
    );
}

#[test]
fn lists_that_are_parallel_run_at_once() {
    let host = Host::start(Options::new());
    // One after the other this would take days; an interrupt ends all of them.
    let sleeps = vec![json!([{"delta": "."}, {"sleep_ms": 80_000_000}]); 6];
    host.send(&script_turn("s", "r", &json!([{"parallel": sleeps}])));
    let mut deltas = 0;
    host.find("a delta of each list", |frame| {
        deltas += usize::from(frame.event() == Some("message.delta"));
        (deltas == 6).then_some(())
    });
    host.ask(&interrupt("s", "i"));
    assert_eq!(host.answer("r")["interrupted"], true);
}

#[test]
fn a_sleep_ends_with_an_interrupt_and_so_do_spaced_deltas() {
    let host = Host::start(Options::new());
    for (sid, steps) in [
        (
            "sleep",
            json!([{"delta": "x"}, {"sleep_ms": 3_600_000}, {"say": "no"}]),
        ),
        (
            "spaced",
            json!([{"deltas": {"count": 1000, "text": "x", "every_ms": 3_600_000}}, {"say": "no"}]),
        ),
    ] {
        host.send(&script_turn(sid, sid, &steps));
        host.wait_event(sid, "message.delta");
        host.ask(&interrupt(sid, &format!("i {sid}")));
        assert_eq!(host.answer(sid)["interrupted"], true);
        assert_eq!(show(&host, sid), "message.delta x\ninterrupted: x\n");
    }
}

#[test]
fn an_invalid_script_says_what_is_wrong() {
    let host = Host::start(Options::with_faults());
    let check = |prompt: &str, parts: &[&str]| {
        let error = host.ask(&turn(prompt, prompt, prompt));
        assert_eq!(
            (error.kind(), &error["reason"]),
            ("turn.error", &json!("invalid")),
            "{}",
            error.line()
        );
        let message = error["message"].as_str().unwrap_or_default();
        for part in parts {
            assert!(
                message.contains(part),
                "{prompt}: {message:?} has no {part:?}"
            );
        }
    };
    check("!script ", &[]);
    check("!script {}", &["list"]);
    check("!script nonsense", &[]);
    check("!script [", &[]);
    check("!script [1]", &[]);
    check("!script [{}]", &[]);
    check(r#"!script [{"dance": 1}]"#, &["dance"]);
    check(r#"!script [{"delta": 7}]"#, &["delta"]);
    check(r#"!script [{"say": []}]"#, &["say"]);
    check(r#"!script [{"reasoning": null}]"#, &["reasoning"]);
    check(r#"!script [{"sleep_ms": "long"}]"#, &["sleep_ms"]);
    check(r#"!script [{"sleep_ms": -1}]"#, &["sleep_ms"]);
    check(r#"!script [{"stuck_ms": "x"}]"#, &["stuck_ms"]);
    check(
        r#"!script [{"deltas": {"count": "x", "text": "y"}}]"#,
        &["count"],
    );
    check(
        r#"!script [{"deltas": {"count": 1, "text": 2}}]"#,
        &["text"],
    );
    check(
        r#"!script [{"deltas": {"count": 1, "text": "y", "often": 1}}]"#,
        &["often"],
    );
    check(r#"!script [{"parallel": {}}]"#, &["parallel"]);
    check(r#"!script [{"parallel": [[{"dance": 1}]]}]"#, &["dance"]);
    check(r#"!script [{"fail": 1}]"#, &["fail"]);
    check(r#"!script [{"exit": "x"}]"#, &["exit"]);
    // The second step is wrong, so that the first does not run either.
    check(r#"!script [{"delta": "x"}, {"dance": 1}]"#, &["dance"]);
    assert!(
        host.frames()
            .iter()
            .all(|frame| frame.event() != Some("message.delta"))
    );
}

#[test]
fn steps_that_break_a_host_need_the_flag() {
    let host = Host::start(Options::new());
    for step in [
        json!({"stuck_ms": 1}),
        json!({"panic": "x"}),
        json!({"abort": true}),
        json!({"exit": 3}),
    ] {
        for steps in [json!([step]), json!([{"parallel": [[step]]}])] {
            let id = steps.to_string();
            let error = host.ask(&script_turn("s", &id, &steps));
            assert_eq!(
                (error.kind(), &error["reason"]),
                ("turn.error", &json!("invalid")),
                "{}",
                error.line()
            );
            let message = error["message"].as_str().unwrap_or_default();
            assert!(message.contains("--allow-faults"), "{message}");
        }
    }
    assert_eq!(host.ask(&turn("s", "r", "x")).kind(), "turn.end");
}

#[test]
fn a_stuck_step_ends_by_itself() {
    let host = Host::start(Options::with_faults());
    let steps = json!([{"stuck_ms": 1}, {"say": "free"}]);
    host.ask(&script_turn("s", "r", &steps));
    assert_eq!(show(&host, "s"), "complete: free\n");
}

#[test]
fn exit_and_abort_end_the_process() {
    let mut host = Host::start(Options::with_faults());
    host.send(&script_turn("s", "r", &json!([{"exit": 3}])));
    assert_eq!(host.exit(), Exit::Code(3));
    let mut host = Host::start(Options::with_faults());
    host.send(&script_turn("s", "r", &json!([{"abort": true}])));
    let abort = rustix::process::Signal::ABORT.as_raw();
    assert_eq!(host.exit(), Exit::Signal(abort));
}

#[test]
fn a_tool_that_is_not_there_is_a_result_or_an_error_that_names_it() {
    let host = Host::start(Options::new());
    for steps in [
        json!([{"tool": {"name": "no_such_tool", "args": {}}}, {"say": "$last"}]),
        json!([{"ask": {"method": "clarify", "params": {}, "timeout_ms": 1}}, {"say": "$last"}]),
    ] {
        let id = steps.to_string();
        host.ask(&script_turn(&id, &id, &steps));
        let shown: String = host
            .frames_of(&id)
            .iter()
            .map(|frame| frame.line().to_owned())
            .collect();
        assert!(
            shown.contains("no_such_tool") || shown.contains("clarify"),
            "{shown}"
        );
    }
}

fn script_file(text: &str) -> tempfile::NamedTempFile {
    let mut file = tempfile::NamedTempFile::new().expect("a temporary file");
    file.write_all(text.as_bytes()).expect("room for a script");
    file
}

#[test]
fn a_script_file_gives_each_turn_its_list_and_the_last_repeats() {
    let file = script_file(&json!({"turns": [[{"say": "one"}], [{"say": "two"}]]}).to_string());
    let host = Host::start(Options::new().args(["--script".as_ref(), file.path().as_os_str()]));
    for (id, sid, said) in [("1", "a", "one"), ("2", "b", "two"), ("3", "a", "two")] {
        host.ask(&turn(sid, id, "x"));
        let last = host
            .frames_of(sid)
            .iter()
            .rfind(|frame| frame.event() == Some("message.complete"))
            .map(|frame| frame.payload()["text"].clone());
        assert_eq!(last, Some(json!(said)), "turn {id}");
    }
}

#[test]
fn a_bad_script_file_is_an_error_at_the_start() {
    let check = |text: &str, part: &str| {
        let file = script_file(text);
        let args = ["--script".as_ref(), file.path().as_os_str()];
        let mut host = Host::spawn(Options::new().args(args));
        assert_eq!(host.exit(), Exit::Code(2), "{text}");
        assert!(host.frames().is_empty());
        let stderr = host.stderr();
        let path = file.path().to_str().expect("UTF-8");
        assert!(stderr.contains(path) && stderr.contains(part), "{stderr}");
    };
    check("nonsense", "");
    check("{}", "turns");
    check(r#"{"turns": []}"#, "turns");
    check(r#"{"turns": [[{"dance": 1}]]}"#, "dance");
    check(r#"{"turns": [[{"panic": "x"}]]}"#, "--allow-faults");
    let mut host = Host::spawn(Options::new().args(["--script", "/nowhere/script.json"]));
    assert_eq!(host.exit(), Exit::Code(2));
    assert!(host.stderr().contains("/nowhere/script.json"));
}

#[test]
fn a_script_in_a_prompt_has_a_mebibyte() {
    let host = Host::start(Options::new());
    // Steps take many times the memory of their text.
    let long = script(&json!([{"say": "x"}])) + &" ".repeat(1024 * 1024);
    let steps = script(&Value::from(vec![json!({"delta": ""}); 100_000]));
    for prompt in [long, steps] {
        let error = host.ask(&turn("s", &prompt[..20], &prompt));
        assert_eq!(
            (error.kind(), &error["reason"]),
            ("turn.error", &json!("invalid")),
            "{}",
            error.line()
        );
        let message = error["message"].as_str().unwrap_or_default();
        assert!(message.contains("1048576"), "{message}");
    }
    let peak = host.peak_mib();
    assert!(peak < 64.0, "{peak} MiB");
    // Just as long is not too long.
    let steps = script(&json!([{"say": "x"}]));
    let fits = format!("{steps}{}", " ".repeat(1000 * 1024));
    assert_eq!(host.ask(&turn("s", "fits", &fits)).kind(), "turn.end");
}

#[test]
fn an_echo_takes_no_memory_for_each_word() {
    let host = Host::start(Options::new().forget_deltas());
    let prompt = "x ".repeat(4 * 1024 * 1024);
    host.send(&turn("s", "r", &prompt));
    let end = host.answer("r");
    assert_eq!(
        (end.kind(), &end["interrupted"]),
        ("turn.end", &json!(false))
    );
    let complete = host.wait_event("s", "message.complete");
    let text = complete.payload()["text"].as_str().unwrap_or_default();
    assert!(text == prompt, "{} bytes", text.len());
    let peak = host.peak_mib();
    assert!(peak < 300.0, "a prompt of 8 MiB took {peak} MiB");
}

#[test]
fn the_results_of_parallel_lists_come_in_the_order_of_the_lists() {
    let host = Host::start(Options::new());
    let tool = |name: &str| json!({"tool": {"name": name, "args": {}}});
    // The first list is done last.
    let lists = json!([
        [{"sleep_ms": 300}, tool("first")],
        [{"sleep_ms": 100}, tool("second")],
        [],
        [tool("fourth")],
    ]);
    let steps = json!([{"parallel": lists}, {"say": "$last"}]);
    assert_eq!(host.ask(&script_turn("s", "r", &steps)).kind(), "turn.end");
    let complete = host.wait_event("s", "message.complete");
    let last: Value = serde_json::from_str(complete.payload()["text"].as_str().unwrap_or_default())
        .expect("the list of the results");
    let last = last.as_array().expect("a list");
    assert_eq!((last.len(), &last[2]), (4, &Value::Null));
    for (place, name) in [(0, "first"), (1, "second"), (3, "fourth")] {
        let result = last[place].to_string();
        assert!(result.contains(name), "{place}: {result}");
    }
}

#[test]
fn an_interrupt_ends_parallel_lists_at_every_step() {
    let host = Host::start(Options::new().args(["--workers", "2"]));
    let hour = 3_600_000;
    // More lists than workers, some with lists of their own.
    let sleeps = json!([{"delta": "s"}, {"sleep_ms": hour}, {"delta": "no"}]);
    let spaced = json!([{"deltas": {"count": 9, "text": "d", "every_ms": hour}}, {"delta": "no"}]);
    let inner = json!([{"parallel": [sleeps, spaced]}, {"delta": "no"}]);
    let lists = json!([sleeps, spaced, inner, sleeps, []]);
    for sid in ["a", "b"] {
        let steps = json!([{"parallel": lists}, {"say": "no"}]);
        host.send(&script_turn(sid, sid, &steps));
    }
    for sid in ["a", "b"] {
        let mut deltas = 0;
        host.find("a delta of each list", |frame| {
            deltas +=
                usize::from(frame.sid() == Some(sid) && frame.event() == Some("message.delta"));
            (deltas == 5).then_some(())
        });
        host.ask(&interrupt(sid, &format!("i {sid}")));
        assert_eq!(host.answer(sid)["interrupted"], true);
        assert!(!show(&host, sid).contains("no"), "{}", show(&host, sid));
    }
    // Both workers are free again.
    host.send(&script_turn("a", "a2", &json!([{"sleep_ms": hour}])));
    host.wait_started("a2");
    assert_eq!(host.ask(&turn("b", "b2", "x")).kind(), "turn.end");
}

#[test]
fn a_script_file_that_is_a_pipe_is_refused() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let path = folder.path().join("script.json");
    make_pipe(&path);
    let mut host = Host::spawn(Options::new().args(["--script".as_ref(), path.as_os_str()]));
    assert_eq!(host.exit(), Exit::Code(2));
    let shown = path.to_str().expect("UTF-8");
    assert!(host.stderr().contains(shown), "{}", host.stderr());
}

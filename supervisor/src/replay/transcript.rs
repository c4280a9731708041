//! Turns what went by into the lines of a fixture that passes when it is played.
//!
//! What differs from run to run becomes a placeholder, what is checked anyway (`host_ns`, `seq`)
//! or comes by the clock is left out, and neighbouring deltas become one line. Pure; no I/O.

use std::collections::{BTreeMap, HashMap, HashSet};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use serde_json::value::RawValue;

use super::fixture::{Exit, signal_name};
use super::json::{Json, quote};
use super::pattern::{Kind, find_id, is_hex32, literal};

/// Fields whose values differ from run to run, wherever they stand.
const VOLATILE: [(&str, Kind); 21] = [
    ("host_ns", Kind::Ns),
    ("started_ns", Kind::Ns),
    ("ended_ns", Kind::Ns),
    ("applied_ns", Kind::Ns),
    ("activity_ns", Kind::Ns),
    ("host_pid", Kind::Pid),
    ("old_ppid", Kind::Pid),
    ("ppid", Kind::Pid),
    ("boot_id", Kind::Hex32),
    ("build_sha", Kind::Text),
    ("version", Kind::Text),
    ("hermes_home", Kind::Text),
    ("home", Kind::Path),
    ("cwd", Kind::Path),
    ("file", Kind::Path),
    ("rss_mb", Kind::Number),
    ("queued_turns", Kind::Number),
    ("duration_s", Kind::Number),
    ("timestamp", Kind::Number),
    ("last_active", Kind::Number),
    ("usage", Kind::Any),
];

/// Deltas that are not yet written down.
enum Pending {
    /// Their type and what they join to so far.
    Joined(String, String),
    /// Where the stream stops is a matter of timing.
    Open,
}

/// A transcript that grows.
#[derive(Default)]
pub(super) struct Transcript {
    pending: BTreeMap<String, Pending>,
    /// Sessions whose turn was told to end.
    ending: HashSet<String>,
    /// Sessions with a turn that runs.
    running: HashSet<String>,
    /// Identities that were sent, as JSON: an answer gives them back.
    sent_ids: HashSet<String>,
    /// Identities of the host's requests, with their names here.
    asked: HashMap<String, String>,
    home: Option<String>,
    lines: Vec<String>,
}

impl Transcript {
    /// The lines that are complete.
    pub(super) fn take_lines(&mut self) -> Vec<String> {
        std::mem::take(&mut self.lines)
    }

    /// How the host is started.
    pub(super) fn host(
        &mut self,
        args: &[String],
        env: &BTreeMap<String, String>,
        script: Option<&RawValue>,
    ) {
        let args = Json::List(args.iter().cloned().map(Json::Text).collect());
        let env = env
            .iter()
            .map(|(name, value)| (name.clone(), Json::Text(value.clone())));
        let env = Json::Object(env.collect());
        let script = script.map(|script| format!(r#", "script": {}"#, script.get()));
        let script = script.unwrap_or_default();
        self.lines.push(format!(
            r#"{{"host": {{"args": {args}, "env": {env}}}{script}}}"#
        ));
    }

    /// A line that was sent to the host; `whole` when its line feed was, too.
    pub(super) fn sent(&mut self, line: &[u8], whole: bool) {
        self.flush();
        // What would be read as a name of the fixture's own has to be hidden as well.
        let text = str::from_utf8(line)
            .ok()
            .filter(|text| find_id(text).is_none());
        let Some(text) = text else {
            let lf = if whole { "" } else { r#", "lf": false"# };
            self.lines
                .push(format!(r#"{{"in_base64": "{}"{lf}}}"#, BASE64.encode(line)));
            return;
        };
        let frame = Json::parse(text).ok();
        if let Some(frame) = &frame {
            self.sent_ids
                .extend(frame.get("request_id").map(Json::to_string));
            match (frame.text_at(&["type"]), frame.text_at(&["sid"])) {
                (Some("interrupt" | "session.close"), Some(sid)) => self.end_turn(sid),
                (Some("shutdown"), _) => self.end_turns(),
                _ => {}
            }
        }
        let mut named = text.to_owned();
        for (id, name) in &self.asked {
            named = named.replace(id, &format!("<id:{name}>"));
        }
        // A frame stays as it was written; anything that a JSON value would not keep goes as text.
        let raw = frame.is_some() && text.starts_with('{') && text.ends_with('}');
        self.lines.push(match (raw, whole) {
            (true, true) => format!(r#"{{"in": {named}}}"#),
            (_, true) => format!(r#"{{"in_text": {}}}"#, quote(&named)),
            (_, false) => format!(r#"{{"in_text": {}, "lf": false}}"#, quote(&named)),
        });
    }

    /// A line that the host has written.
    pub(super) fn received(&mut self, line: &[u8]) {
        let frame = str::from_utf8(line)
            .ok()
            .and_then(|text| Json::parse(text).ok());
        let Some(frame) = frame.filter(|frame| frame.text_at(&["type"]).is_some()) else {
            let line = quote(&format!(
                "a line that is no frame: {}",
                String::from_utf8_lossy(line)
            ));
            self.lines.push(format!(r#"{{"cut": {line}}}"#));
            return;
        };
        let kind = frame.text_at(&["type"]).unwrap_or_default();
        let event = frame.text_at(&["message", "params", "type"]);
        let method = frame.text_at(&["message", "method"]);
        let sid = frame.text_at(&["sid"]).unwrap_or_default();
        if kind == "hb" || method == Some("compute_host.activity") {
            return;
        }
        if let Some(event) = event.filter(|event| event.ends_with(".delta"))
            && let Some(text) = frame.text_at(&["message", "params", "payload", "text"])
        {
            self.delta(sid, event, text);
            return;
        }
        if kind == "rpc" || kind == "turn.end" || kind == "turn.error" {
            self.flush_session(sid);
        }
        match kind {
            "hello" => self.home = frame.text_at(&["home"]).map(str::to_owned),
            "turn.started" => {
                self.running.insert(sid.to_owned());
            }
            "turn.end" | "turn.error" => {
                self.running.remove(sid);
                self.ending.remove(sid);
            }
            _ => {}
        }
        if let (Some(method), Some(id)) = (method, frame.text_at(&["message", "id"])) {
            let name = format!("{method}-{}", self.asked.len() + 1);
            self.asked.entry(id.to_owned()).or_insert(name);
        }
        let partial = event == Some("message.complete") && self.ending.contains(sid);
        let pattern = self.pattern(&frame, "", partial);
        self.lines.push(match short(&pattern) {
            Some(event) => format!(r#"{{"event": {event}}}"#),
            None => format!(r#"{{"out": {pattern}}}"#),
        });
    }

    /// A signal that was sent to the host.
    pub(super) fn signal(&mut self, number: i32) {
        self.flush();
        self.end_turns();
        if let Some(name) = signal_name(number) {
            self.lines.push(format!(r#"{{"signal": "{name}"}}"#));
        }
    }

    /// The host's input was closed.
    pub(super) fn closed(&mut self) {
        self.flush();
        self.end_turns();
        self.lines.push(r#"{"close": "stdin"}"#.to_owned());
    }

    /// The host has ended.
    pub(super) fn exited(&mut self, exit: Exit) {
        self.flush();
        self.lines.push(match exit {
            Exit::Code(code) => format!(r#"{{"exit": {code}}}"#),
            Exit::Signal(number) => {
                let name = signal_name(number).unwrap_or("KILL");
                format!(r#"{{"exit": "{name}"}}"#)
            }
        });
    }

    fn delta(&mut self, sid: &str, kind: &str, text: &str) {
        match self.pending.get_mut(sid) {
            Some(Pending::Open) => {}
            Some(Pending::Joined(joined, so_far)) if joined == kind => so_far.push_str(text),
            _ => {
                self.flush_session(sid);
                let joined = Pending::Joined(kind.to_owned(), text.to_owned());
                self.pending.insert(sid.to_owned(), joined);
            }
        }
    }

    /// From here on it depends on timing how far the turn of `sid` gets.
    fn end_turn(&mut self, sid: &str) {
        if self.running.contains(sid) {
            self.ending.insert(sid.to_owned());
            self.pending.insert(sid.to_owned(), Pending::Open);
        }
    }

    fn end_turns(&mut self) {
        for sid in self.running.clone() {
            self.end_turn(&sid);
        }
    }

    fn flush(&mut self) {
        let sids: Vec<_> = self.pending.keys().cloned().collect();
        for sid in sids {
            if matches!(self.pending.get(&sid), Some(Pending::Joined(..))) {
                self.flush_session(&sid);
            }
        }
    }

    fn flush_session(&mut self, sid: &str) {
        let (kind, text) = match self.pending.remove(sid) {
            Some(Pending::Joined(kind, text)) => (kind, literal(&text)),
            Some(Pending::Open) => ("message.delta".to_owned(), "<any>".to_owned()),
            None => return,
        };
        self.lines.push(format!(
            r#"{{"deltas": {{"sid": {}, "type": {}, "text": {}}}}}"#,
            quote(sid),
            quote(&kind),
            quote(&text)
        ));
    }

    /// `value`, which stands under `name`, with placeholders for what differs from run to run.
    fn pattern(&self, value: &Json, name: &str, partial: bool) -> Json {
        let placeholder = |kind: Kind| Json::Text(kind.placeholder().to_owned());
        let volatile = VOLATILE.iter().find(|(field, _)| *field == name);
        if let Some((_, kind)) = volatile.filter(|(_, kind)| kind.fits(value)) {
            return placeholder(*kind);
        }
        match value {
            Json::Text(_) if partial && name == "text" => placeholder(Kind::Text),
            Json::Text(text) => self.text_pattern(text, name),
            Json::List(items) => Json::List(
                items
                    .iter()
                    .map(|item| self.pattern(item, "", partial))
                    .collect(),
            ),
            Json::Object(fields) => {
                let kept = fields
                    .iter()
                    .filter(|(name, _)| name != "host_ns" && name != "seq");
                let pattern = |(name, value): &(String, Json)| {
                    (name.clone(), self.pattern(value, name, partial))
                };
                Json::Object(kept.map(pattern).collect())
            }
            other => other.clone(),
        }
    }

    fn text_pattern(&self, text: &str, name: &str) -> Json {
        if let Some(name) = self.asked.get(text) {
            return Json::Text(format!("<id:{name}>"));
        }
        if name == "request_id" && is_hex32(text) && !self.sent_ids.contains(&quote(text)) {
            return Json::Text(Kind::Hex32.placeholder().to_owned());
        }
        if self
            .home
            .as_ref()
            .is_some_and(|home| text.starts_with(home.as_str()))
        {
            return Json::Text(Kind::Path.placeholder().to_owned());
        }
        Json::Text(literal(text))
    }
}

/// An event of a session in its short form; `None` for a frame that has more to say.
fn short(frame: &Json) -> Option<Json> {
    let has_only = |json: &Json, names: &[&str]| {
        matches!(json, Json::Object(fields)
            if fields.iter().all(|(name, _)| names.contains(&name.as_str())))
    };
    let (sid, message) = (frame.get("sid")?, frame.get("message")?);
    let params = message.get("params")?;
    let short = has_only(frame, &["type", "sid", "message"])
        && has_only(message, &["jsonrpc", "method", "params"])
        && has_only(params, &["type", "session_id", "payload"])
        && message.text_at(&["jsonrpc"]) == Some("2.0")
        && message.text_at(&["method"]) == Some("event")
        && params.get("session_id") == Some(sid);
    let mut fields = vec![("sid", sid), ("type", params.get("type")?)];
    fields.extend(params.get("payload").map(|payload| ("payload", payload)));
    let owned = |(name, value): (&str, &Json)| (name.to_owned(), value.clone());
    short.then(|| Json::Object(fields.into_iter().map(owned).collect()))
}

#[cfg(test)]
mod tests {
    use expect_test::{Expect, expect};

    use super::*;

    /// Lines of the host begin with `<`, lines to it with `>`.
    #[track_caller]
    fn check(traffic: &str, expected: Expect) {
        let mut transcript = Transcript::default();
        for line in traffic
            .lines()
            .map(str::trim)
            .filter(|line| !line.is_empty())
        {
            match line.split_at(1) {
                (">", line) => transcript.sent(line.as_bytes(), true),
                (_, line) => transcript.received(line.as_bytes()),
            }
        }
        transcript.exited(Exit::Code(0));
        expected.assert_eq(&(transcript.take_lines().join("\n") + "\n"));
    }

    #[test]
    fn a_turn() {
        check(
            r#"
            <{"type":"hello","host_pid":7,"boot_id":"0123456789abcdef0123456789abcdef","home":"/h","hermes_home":"","protocol_version":1,"host_ns":5}
            >{"type":"turn.start","sid":"s1","request_id":"r1",  "text":"a <any>"}
            <{"type":"turn.accepted","sid":"s1","request_id":"r1","queued_turns":0,"host_ns":6}
            <{"type":"turn.started","sid":"s1","request_id":"r1","started_ns":6,"host_ns":6}
            <{"type":"rpc","host_ns":7,"sid":"s1","message":{"method":"event","params":{"type":"message.delta","seq":1,"payload":{"text":"a "}}}}
            <{"type":"hb","host_ns":7,"active_turns":1}
            <{"type":"rpc","host_ns":8,"sid":"s1","message":{"method":"event","params":{"type":"message.delta","seq":2,"payload":{"text":"<any>"}}}}
            <{"type":"rpc","host_ns":9,"sid":"s1","message":{"jsonrpc":"2.0","method":"event","params":{"type":"message.complete","session_id":"s1","seq":3,"payload":{"text":"a <any>","usage":{"input":1}}}}}
            <{"type":"turn.end","sid":"s1","request_id":"r1","ended_ns":9,"history_version":1,"session_info":{"cwd":"/h/x","log":"/h/log"},"host_ns":9}
            "#,
            expect![[r#"
                {"out": {"type":"hello","host_pid":"<pid>","boot_id":"<hex32>","home":"<path>","hermes_home":"<text>","protocol_version":1}}
                {"in": {"type":"turn.start","sid":"s1","request_id":"r1",  "text":"a <any>"}}
                {"out": {"type":"turn.accepted","sid":"s1","request_id":"r1","queued_turns":"<number>"}}
                {"out": {"type":"turn.started","sid":"s1","request_id":"r1","started_ns":"<ns>"}}
                {"deltas": {"sid": "s1", "type": "message.delta", "text": "<literal a <any>>"}}
                {"event": {"sid":"s1","type":"message.complete","payload":{"text":"<literal a <any>>","usage":"<any>"}}}
                {"out": {"type":"turn.end","sid":"s1","request_id":"r1","ended_ns":"<ns>","history_version":1,"session_info":{"cwd":"<path>","log":"<path>"}}}
                {"exit": 0}
            "#]],
        );
    }

    #[test]
    fn an_interrupted_turn_may_get_a_little_further() {
        check(
            r#"
            <{"type":"turn.started","sid":"s1","request_id":"r1","host_ns":6}
            <{"type":"rpc","sid":"s1","message":{"params":{"type":"reasoning.delta","seq":1,"payload":{"text":"a"}}}}
            <{"type":"rpc","sid":"s1","message":{"params":{"type":"message.delta","seq":1,"payload":{"text":"a"}}}}
            >{"type":"interrupt","sid":"s1","request_id":"q1"}
            <{"type":"rpc","sid":"s1","message":{"params":{"type":"message.delta","seq":1,"payload":{"text":"b"}}}}
            <{"type":"interrupt.ack","sid":"s1","request_id":"q1","applied":true,"applied_ns":7}
            <{"type":"rpc","sid":"s1","message":{"params":{"type":"message.complete","payload":{"text":"ab"}}}}
            <{"type":"turn.end","sid":"s1","request_id":"r1"}
            >{"type":"interrupt","sid":"s1","request_id":"q2"}
            "#,
            expect![[r#"
                {"out": {"type":"turn.started","sid":"s1","request_id":"r1"}}
                {"deltas": {"sid": "s1", "type": "reasoning.delta", "text": "a"}}
                {"deltas": {"sid": "s1", "type": "message.delta", "text": "a"}}
                {"in": {"type":"interrupt","sid":"s1","request_id":"q1"}}
                {"out": {"type":"interrupt.ack","sid":"s1","request_id":"q1","applied":true,"applied_ns":"<ns>"}}
                {"deltas": {"sid": "s1", "type": "message.delta", "text": "<any>"}}
                {"out": {"type":"rpc","sid":"s1","message":{"params":{"type":"message.complete","payload":{"text":"<text>"}}}}}
                {"out": {"type":"turn.end","sid":"s1","request_id":"r1"}}
                {"in": {"type":"interrupt","sid":"s1","request_id":"q2"}}
                {"exit": 0}
            "#]],
        );
    }

    #[test]
    fn what_is_no_frame_goes_as_it_is() {
        check(
            "\n>{not json\n>[1]\n>{\"a\":1}\r\n<no frame\n",
            expect![[r#"
                {"in_text": "{not json"}
                {"in_text": "[1]"}
                {"in": {"a":1}}
                {"cut": "a line that is no frame: no frame"}
                {"exit": 0}
            "#]],
        );
        let mut transcript = Transcript::default();
        transcript.sent(b"{\"a\":1}\r", true);
        transcript.sent(b"\xff", false);
        transcript.sent(b" {}", false);
        transcript.sent(b"<id:x>", true);
        transcript.closed();
        transcript.signal(15);
        transcript.exited(Exit::Signal(9));
        expect![[r#"
            {"in_text": "{\"a\":1}\r"}
            {"in_base64": "/w==", "lf": false}
            {"in_text": " {}", "lf": false}
            {"in_base64": "PGlkOng+"}
            {"close": "stdin"}
            {"signal": "TERM"}
            {"exit": "KILL"}"#]]
        .assert_eq(&transcript.take_lines().join("\n"));
    }

    #[test]
    fn a_question_and_its_answer_share_a_name() {
        check(
            r#"
            <{"type":"rpc","sid":"s1","message":{"id":"srq-0123456789ab","method":"clarify","params":{}}}
            >{"type":"respond","sid":"s1","request_id":"q1","params":{"frame":{"id":"srq-0123456789ab"}}}
            <{"type":"error","request_id":"0123456789abcdef0123456789abcdef","message":"m"}
            "#,
            expect![[r#"
                {"out": {"type":"rpc","sid":"s1","message":{"id":"<id:clarify-1>","method":"clarify","params":{}}}}
                {"in": {"type":"respond","sid":"s1","request_id":"q1","params":{"frame":{"id":"<id:clarify-1>"}}}}
                {"out": {"type":"error","request_id":"<hex32>","message":"m"}}
                {"exit": 0}
            "#]],
        );
    }
}

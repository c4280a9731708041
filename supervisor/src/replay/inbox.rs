//! What a host has written, kept until a fixture asks for it.
//!
//! A host promises order within a session and says nothing about the order between sessions, or
//! between a session and the replies. So each frame goes into a lane, and a fixture can only take
//! the first one of a lane. What every frame owes is checked here as well, fixture or not: it is a
//! JSON object that begins with `type` and has `host_ns`, the first one is a hello, `seq` counts up
//! by one in each session, and no turn starts that was not accepted.
//!
//! Pure; no I/O.

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};

use super::fixture::{Deltas, Expected};
use super::json::{Json, quote};
use super::pattern::{Bindings, Mismatch, Pattern};

/// The method that tells, once a second, when an agent last made progress.
const ACTIVITY: &str = "compute_host.activity";

/// Frames that share an order.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
enum Lane {
    /// The events of a session and the course of its accepted turns.
    Session(String),
    /// What answers a frame: its `request_id`, as JSON.
    Reply(String),
    /// Frames that belong to neither, by type.
    Kind(String),
    /// Frames that come by the clock and may be passed over, by type.
    Clock(String),
}

/// A frame that no line has asked for yet.
#[derive(Debug)]
struct Frame {
    /// Frames that arrived before it.
    index: u64,
    json: Json,
}

/// What an expected frame has met.
#[derive(Debug)]
pub(super) enum Taken {
    /// It is there, and is now taken.
    Yes,
    /// It can still come.
    NotYet,
    /// Another frame stands in its place.
    Never(Nearest),
}

/// A frame that does not fit, and where.
#[derive(Debug)]
pub(super) struct Nearest {
    pub(super) frame: String,
    pub(super) mismatches: Vec<Mismatch>,
}

/// The frames of one host that are not yet taken.
#[derive(Debug, Default)]
pub(super) struct Inbox {
    lanes: BTreeMap<Lane, VecDeque<Frame>>,
    received: u64,
    turns: u64,
    host_pid: Option<u64>,
    accepted: HashSet<String>,
    last_seq: HashMap<String, u64>,
    bindings: Bindings,
}

impl Inbox {
    /// Frames received so far.
    pub(super) fn received(&self) -> u64 {
        self.received
    }

    /// Terminal frames received so far.
    pub(super) fn turns(&self) -> u64 {
        self.turns
    }

    /// The process that the last hello names.
    pub(super) fn host_pid(&self) -> Option<u64> {
        self.host_pid
    }

    /// The value of `<id:name>`.
    pub(super) fn id(&self, name: &str) -> Option<&str> {
        self.bindings.get(name).map(String::as_str)
    }

    /// Takes in one line of the host.
    ///
    /// # Errors
    /// What the line owes to every reader and does not keep.
    pub(super) fn receive(&mut self, line: &[u8]) -> Result<(), String> {
        let text = str::from_utf8(line).map_err(|error| format!("not UTF-8: {error}"))?;
        let json = Json::parse(text).map_err(|error| format!("not JSON: {error}"))?;
        let Json::Object(fields) = &json else {
            return Err("not an object".to_owned());
        };
        let kind = match fields.first() {
            Some((name, Json::Text(kind))) if name == "type" => kind.clone(),
            _ => return Err("a frame begins with its type".to_owned()),
        };
        if json.get("host_ns").and_then(Json::whole_number).is_none() {
            return Err("a frame has host_ns, a whole number".to_owned());
        }
        if self.received == 0 && kind != "hello" {
            return Err("the first frame is a hello".to_owned());
        }
        self.received += 1;
        match kind.as_str() {
            "hello" => {
                self.host_pid = json.get("host_pid").and_then(Json::whole_number);
                self.last_seq.clear();
            }
            "rpc" => self.check_seq(&json)?,
            "turn.accepted" => {
                self.accepted
                    .extend(json.get("request_id").map(Json::to_string));
            }
            "turn.started" if !self.is_accepted(json.get("request_id")) => {
                return Err("a turn started that was not accepted".to_owned());
            }
            "turn.end" | "turn.error" => self.turns += 1,
            _ => {}
        }
        let lane = self
            .lane(&kind, |name| json.get(name))
            .unwrap_or(Lane::Kind(kind));
        self.lanes.entry(lane).or_default().push_back(Frame {
            index: self.received,
            json,
        });
        Ok(())
    }

    fn check_seq(&mut self, json: &Json) -> Result<(), String> {
        let (Some(sid), Some(seq)) = (
            json.text_at(&["sid"]),
            json.at(&["message", "params", "seq"]),
        ) else {
            return Ok(());
        };
        let next = self.last_seq.get(sid).map_or(1, |last| last + 1);
        if seq.whole_number() != Some(next) {
            return Err(format!(
                "seq of session {sid} is {seq}; after the last one comes {next}"
            ));
        }
        self.last_seq.insert(sid.to_owned(), next);
        Ok(())
    }

    fn is_accepted(&self, request_id: Option<&Json>) -> bool {
        request_id.is_some_and(|id| self.accepted.contains(&id.to_string()))
    }

    /// The lane of a frame of type `kind`; `None` where a field that decides is not known.
    ///
    /// The refusal of a turn comes from the reader, while another turn of that session may run: it
    /// is a reply. The end of an accepted turn has its place among the session's events.
    fn lane<'a>(&self, kind: &str, field: impl Fn(&str) -> Option<&'a Json>) -> Option<Lane> {
        let session = || match field("sid") {
            Some(Json::Text(sid)) => Some(Lane::Session(sid.clone())),
            _ => None,
        };
        let reply = || field("request_id").map(|id| Lane::Reply(id.to_string()));
        match kind {
            "hb" => Some(Lane::Clock(kind.to_owned())),
            "rpc" => match field("message").and_then(|message| message.text_at(&["method"])) {
                Some(method @ ACTIVITY) => Some(Lane::Clock(method.to_owned())),
                _ => session(),
            },
            "turn.started" => session(),
            "turn.end" | "turn.error" if self.is_accepted(field("request_id")) => session(),
            _ => reply(),
        }
    }

    /// Takes the frame that `expected` describes, if it is there.
    pub(super) fn take(&mut self, expected: &Expected) -> Taken {
        let lane = self.expected_lane(&expected.pattern);
        if let Some(lane @ Lane::Clock(_)) = &lane {
            return self.take_by_clock(lane, expected);
        }
        let mut heads: Vec<_> = self
            .lanes
            .iter()
            .filter(|(at, _)| lane.as_ref().is_none_or(|lane| *at == lane))
            .filter(|(at, _)| !matches!(at, Lane::Clock(_)))
            .filter_map(|(at, frames)| Some((frames.front()?, at)))
            .collect();
        heads.sort_by_key(|(frame, _)| frame.index);
        for (frame, at) in &heads {
            let comparison = expected
                .pattern
                .compare(&frame.json, expected.exact, &self.bindings);
            if comparison.mismatches.is_empty() {
                let at = (*at).clone();
                self.bindings.extend(comparison.bound);
                self.lanes.get_mut(&at).and_then(VecDeque::pop_front);
                return Taken::Yes;
            }
        }
        // In the lane that the line names, or in that of its type if it names none, nothing that
        // comes later can stand before this frame.
        let own = |at: &Lane| match (&lane, at) {
            (Some(lane), at) => at == lane,
            (None, Lane::Kind(kind)) => expected.pattern.text("type") == Some(kind),
            (None, _) => false,
        };
        match heads.iter().find(|(_, at)| own(at)) {
            Some((frame, _)) => Taken::Never(self.nearest_of(frame, expected)),
            None => Taken::NotYet,
        }
    }

    /// Takes the first frame by the clock that fits, and drops those before it.
    fn take_by_clock(&mut self, lane: &Lane, expected: &Expected) -> Taken {
        let Some(frames) = self.lanes.get_mut(lane) else {
            return Taken::NotYet;
        };
        let fits = |frame: &Frame| {
            let comparison = expected
                .pattern
                .compare(&frame.json, expected.exact, &self.bindings);
            comparison.mismatches.is_empty()
        };
        match frames.iter().position(fits) {
            Some(at) => {
                frames.drain(..=at);
                Taken::Yes
            }
            None => Taken::NotYet,
        }
    }

    /// The lane where a frame that fits has to stand, if the pattern tells.
    fn expected_lane(&self, pattern: &Pattern) -> Option<Lane> {
        let kind = pattern.text("type")?;
        let method = pattern
            .get("message")
            .and_then(|message| message.text("method"));
        if let Some(method @ ACTIVITY) = method {
            return Some(Lane::Clock(method.to_owned()));
        }
        let unknown = |name| {
            pattern
                .get(name)
                .is_some_and(|value| value.only_value().is_none())
        };
        if unknown("request_id") || unknown("sid") {
            return None;
        }
        self.lane(kind, |name| pattern.get(name).and_then(Pattern::only_value))
    }

    /// Takes neighbouring deltas as far as they are there. What is left of their text stays in
    /// `left`, which is `None` where any text will do.
    pub(super) fn take_deltas(&mut self, deltas: &Deltas, left: &mut Option<String>) -> Taken {
        let mut frames = self.lanes.get_mut(&Lane::Session(deltas.sid.clone()));
        loop {
            if left.as_deref() == Some("") {
                return Taken::Yes;
            }
            let Some(frames) = frames.as_mut().filter(|frames| !frames.is_empty()) else {
                return Taken::NotYet;
            };
            let frame = &mut frames[0].json;
            let taken = match (delta_text(frame, &deltas.kind), left.as_mut()) {
                (Some(text), Some(left)) => take_text(text, left),
                (Some(_), None) => Step::Whole,
                (None, None) => return Taken::Yes,
                (None, Some(_)) => Step::Wrong("another frame".to_owned()),
            };
            match taken {
                Step::Whole => drop(frames.pop_front()),
                Step::Part => return Taken::Yes,
                Step::Wrong(got) => {
                    let expected = quote(left.as_deref().unwrap_or_default());
                    let path = format!("text of the next {}", deltas.kind);
                    let mismatches = vec![Mismatch {
                        path,
                        expected,
                        got: Some(got),
                    }];
                    return Taken::Never(Nearest {
                        frame: frame.to_string(),
                        mismatches,
                    });
                }
            }
        }
    }

    /// Of all frames that could stand for `expected` the one with the fewest differences.
    pub(super) fn nearest(&self, expected: &Expected) -> Option<Nearest> {
        let kind = expected.pattern.text("type");
        self.lanes
            .values()
            .flatten()
            .filter(|frame| frame.json.text_at(&["type"]) == kind)
            .map(|frame| self.nearest_of(frame, expected))
            .min_by_key(|nearest| nearest.mismatches.len())
    }

    fn nearest_of(&self, frame: &Frame, expected: &Expected) -> Nearest {
        let comparison = expected
            .pattern
            .compare(&frame.json, expected.exact, &self.bindings);
        Nearest {
            frame: frame.json.to_string(),
            mismatches: comparison.mismatches,
        }
    }

    /// What is left when nothing more is expected, in the order of arrival.
    pub(super) fn leftovers(&self) -> Vec<String> {
        let mut left: Vec<_> = self
            .lanes
            .iter()
            .filter(|(lane, _)| !matches!(lane, Lane::Clock(_)))
            .flat_map(|(_, frames)| frames)
            .collect();
        left.sort_by_key(|frame| frame.index);
        left.into_iter()
            .map(|frame| frame.json.to_string())
            .collect()
    }
}

/// The text of a delta of type `kind`, or `None` for another frame.
fn delta_text<'a>(frame: &'a mut Json, kind: &str) -> Option<&'a mut String> {
    if frame.text_at(&["message", "params", "type"]) != Some(kind) {
        return None;
    }
    match frame.at_mut(&["message", "params", "payload", "text"]) {
        Some(Json::Text(text)) => Some(text),
        _ => None,
    }
}

/// How much of a delta a line has taken.
enum Step {
    Whole,
    /// The line is content; the rest of the delta is for the next one.
    Part,
    /// Nothing, as the delta says this instead.
    Wrong(String),
}

/// Takes the text of a delta off what is `left` of the expected one.
fn take_text(text: &mut String, left: &mut String) -> Step {
    if let Some(rest) = left.strip_prefix(text.as_str()) {
        *left = rest.to_owned();
        Step::Whole
    } else if let Some(rest) = text.strip_prefix(left.as_str()) {
        *text = rest.to_owned();
        left.clear();
        Step::Part
    } else {
        Step::Wrong(quote(text))
    }
}

#[cfg(test)]
mod tests {
    use expect_test::{Expect, expect};

    use super::*;

    const HELLO: &str = r#"{"type":"hello","host_pid":7,"host_ns":1}"#;

    fn inbox(frames: &[&str]) -> Inbox {
        let mut inbox = Inbox::default();
        inbox.receive(HELLO.as_bytes()).unwrap();
        for frame in frames {
            let frame = frame.replacen('}', r#","host_ns":1}"#, 1);
            inbox.receive(frame.as_bytes()).unwrap();
        }
        inbox
    }

    fn event(sid: &str, seq: u64, kind: &str, text: &str) -> String {
        format!(
            r#"{{"type":"rpc","host_ns":1,"sid":"{sid}","message":{{"method":"event","params":{{"type":"{kind}","seq":{seq},"payload":{{"text":"{text}"}}}}}}}}"#
        )
    }

    fn with_events(events: &[(&str, u64, &str, &str)]) -> Inbox {
        let mut inbox = inbox(&[]);
        for (sid, seq, kind, text) in events {
            inbox
                .receive(event(sid, *seq, kind, text).as_bytes())
                .unwrap();
        }
        inbox
    }

    fn expected(pattern: &str) -> Expected {
        let pattern = Pattern::compile(Json::parse(pattern).unwrap()).unwrap();
        Expected {
            pattern,
            exact: false,
            optional: false,
        }
    }

    fn take(inbox: &mut Inbox, pattern: &str) -> String {
        told(inbox.take(&expected(pattern)))
    }

    fn told(taken: Taken) -> String {
        match taken {
            Taken::Yes => "taken".to_owned(),
            Taken::NotYet => "not yet".to_owned(),
            Taken::Never(nearest) => {
                let told = nearest.mismatches.iter().map(
                    |Mismatch {
                         path,
                         expected,
                         got,
                     }| {
                        format!(
                            "{path}: {expected}, not {}",
                            got.as_deref().unwrap_or("nothing")
                        )
                    },
                );
                told.collect::<Vec<_>>().join("; ")
            }
        }
    }

    #[test]
    fn what_every_frame_owes_is_checked() {
        let check = |frames: &[&str], expected: Expect| {
            let mut inbox = Inbox::default();
            let told: Vec<_> = frames
                .iter()
                .map(|frame| {
                    inbox
                        .receive(frame.as_bytes())
                        .err()
                        .unwrap_or("good".to_owned())
                })
                .collect();
            expected.assert_eq(&told.join("\n"));
        };
        check(
            &["\u{feff}{}", "", "[1]", "{"],
            expect![[r#"
            not JSON: expected value at line 1 column 1
            not JSON: EOF while parsing a value at line 1 column 0
            not an object
            not JSON: EOF while parsing an object at line 1 column 1"#]],
        );
        check(
            &[
                r#"{"host_ns":1,"type":"hello"}"#,
                r#"{"type":7,"host_ns":1}"#,
            ],
            expect![[r#"
                a frame begins with its type
                a frame begins with its type"#]],
        );
        check(
            &[r#"{"type":"hello"}"#, r#"{"type":"hello","host_ns":1.5}"#],
            expect![[r#"
                a frame has host_ns, a whole number
                a frame has host_ns, a whole number"#]],
        );
        check(
            &[r#"{"type":"hb","host_ns":1}"#],
            expect!["the first frame is a hello"],
        );
        let start = r#"{"type":"turn.started","host_ns":1,"sid":"s1","request_id":"r1"}"#;
        let accept = r#"{"type":"turn.accepted","host_ns":1,"sid":"s1","request_id":"r1"}"#;
        check(
            &[HELLO, start, accept, start],
            expect![[r#"
            good
            a turn started that was not accepted
            good
            good"#]],
        );
        let event = |sid: &str, seq: u64| event(sid, seq, "x", "");
        check(
            &[
                HELLO,
                &event("a", 1),
                &event("b", 1),
                &event("a", 2),
                &event("a", 4),
                &event("b", 1),
            ],
            expect![[r#"
                good
                good
                good
                good
                seq of session a is 4; after the last one comes 3
                seq of session b is 1; after the last one comes 2"#]],
        );
    }

    #[test]
    fn order_holds_within_a_session_and_not_between() {
        let mut inbox = with_events(&[("a", 1, "x", ""), ("b", 1, "y", ""), ("a", 2, "z", "")]);
        let event = |sid: &str, kind: &str| {
            format!(r#"{{"type":"rpc","sid":"{sid}","message":{{"params":{{"type":"{kind}"}}}}}}"#)
        };
        assert_eq!(take(&mut inbox, &event("b", "y")), "taken");
        assert_eq!(take(&mut inbox, &event("b", "w")), "not yet");
        let wrong = take(&mut inbox, &event("a", "z"));
        expect![[r#"message.params.type: "z", not "x""#]].assert_eq(&wrong);
        assert_eq!(take(&mut inbox, &event("a", "x")), "taken");
        assert_eq!(take(&mut inbox, r#"{"type":"hello"}"#), "taken");
        assert_eq!(inbox.leftovers().len(), 1);
    }

    #[test]
    fn a_refusal_is_a_reply_and_an_end_is_not() {
        let mut inbox = inbox(&[
            r#"{"type":"turn.accepted","sid":"a","request_id":"r1"}"#,
            r#"{"type":"turn.started","sid":"a","request_id":"r1"}"#,
            r#"{"type":"turn.error","sid":"a","request_id":"r2","reason":"busy"}"#,
            r#"{"type":"turn.end","sid":"a","request_id":"r1"}"#,
        ]);
        assert_eq!(
            take(
                &mut inbox,
                r#"{"type":"turn.error","sid":"a","request_id":"r2"}"#
            ),
            "taken"
        );
        let early = take(
            &mut inbox,
            r#"{"type":"turn.end","sid":"a","request_id":"r1"}"#,
        );
        expect![[r#"type: "turn.end", not "turn.started""#]].assert_eq(&early);
        assert_eq!(inbox.turns(), 2);
    }

    #[test]
    fn a_reply_with_a_made_id_is_found_by_its_other_fields() {
        let mut inbox = inbox(&[
            r#"{"type":"error","request_id":"0123456789abcdef0123456789abcdef","message":"m"}"#,
        ]);
        let made = r#"{"type":"error","request_id":"<hex32>","message":"M"}"#;
        assert_eq!(take(&mut inbox, made), "not yet");
        assert_eq!(
            told(Taken::Never(inbox.nearest(&expected(made)).unwrap())),
            r#"message: "M", not "m""#
        );
        assert_eq!(take(&mut inbox, &made.replace('M', "m")), "taken");
    }

    #[test]
    fn heartbeats_are_passed_over() {
        let mut inbox = inbox(&[r#"{"type":"hb","n":1}"#, r#"{"type":"hb","n":2}"#]);
        assert_eq!(take(&mut inbox, r#"{"type":"hb","n":3}"#), "not yet");
        assert_eq!(take(&mut inbox, r#"{"type":"hb","n":2}"#), "taken");
        assert_eq!(take(&mut inbox, r#"{"type":"hb","n":1}"#), "not yet");
        assert_eq!(inbox.leftovers(), [HELLO]);
    }

    #[test]
    fn neighbouring_deltas_are_one_text() {
        let deltas = |inbox: &mut Inbox, text: &str| {
            let text = (text != "<any>").then(|| text.to_owned());
            let mut left = text.clone();
            let line = Deltas {
                sid: "a".to_owned(),
                kind: "d.delta".to_owned(),
                text,
            };
            let taken = told(inbox.take_deltas(&line, &mut left));
            format!("{taken}, left {left:?}")
        };
        let d = "d.delta";
        let mut inbox = with_events(&[
            ("a", 1, d, "1 "),
            ("a", 2, d, "2 3 "),
            ("a", 3, d, "4 "),
            ("a", 4, "x", ""),
        ]);
        assert_eq!(deltas(&mut inbox, "1 2 "), r#"taken, left Some("")"#);
        assert_eq!(deltas(&mut inbox, "3 "), r#"taken, left Some("")"#);
        let wrong = deltas(&mut inbox, "5 ");
        expect![[r#"text of the next d.delta: "5 ", not "4 ", left Some("5 ")"#]].assert_eq(&wrong);
        assert_eq!(deltas(&mut inbox, "<any>"), "taken, left None");
        let none = deltas(&mut inbox, "5 ");
        expect![[r#"text of the next d.delta: "5 ", not another frame, left Some("5 ")"#]]
            .assert_eq(&none);
        assert_eq!(deltas(&mut inbox, ""), r#"taken, left Some("")"#);
        let mut inbox = with_events(&[("a", 1, d, "1 ")]);
        assert_eq!(deltas(&mut inbox, "1 2 "), r#"not yet, left Some("2 ")"#);
        assert_eq!(deltas(&mut inbox, "<any>"), "not yet, left None");
    }

    #[test]
    fn names_are_bound_by_the_frame_that_is_taken() {
        let mut inbox = inbox(&[r#"{"type":"note","id":"q1"}"#]);
        assert_eq!(
            take(&mut inbox, r#"{"type":"note","id":"<id:q>","more":1}"#),
            "more: 1, not nothing"
        );
        assert_eq!(inbox.id("q"), None);
        assert_eq!(
            take(&mut inbox, r#"{"type":"note","id":"<id:q>"}"#),
            "taken"
        );
        assert_eq!(inbox.id("q"), Some("q1"));
    }
}

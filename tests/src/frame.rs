//! Frames as they arrive, and what SPEC says of every one of them.

use std::borrow::Cow;
use std::collections::{HashMap, HashSet};
use std::ops::Index;
use std::sync::OnceLock;

use serde::Deserialize;
use serde_json::Value;
use serde_json::value::RawValue;
use turnhost_protocol::process::monotonic_ns;

/// A frame from a host.
#[derive(Debug)]
pub struct Frame {
    line: String,
    kind: String,
    sid: Option<String>,
    request_id: Option<String>,
    /// The same, where it is text.
    request_id_text: Option<String>,
    host_ns: u64,
    event: Option<Event>,
    value: OnceLock<Value>,
}

#[derive(Debug)]
struct Event {
    kind: String,
    seq: u64,
}

#[derive(Deserialize)]
struct Head<'a> {
    #[serde(borrow, rename = "type")]
    kind: Cow<'a, str>,
    #[serde(borrow)]
    sid: Option<Cow<'a, str>>,
    #[serde(borrow)]
    request_id: Option<&'a RawValue>,
    host_ns: u64,
    #[serde(borrow)]
    message: Option<&'a RawValue>,
}

#[derive(Deserialize)]
struct RpcHead<'a> {
    #[serde(borrow)]
    jsonrpc: Cow<'a, str>,
    #[serde(borrow)]
    method: Cow<'a, str>,
    params: &'a RawValue,
}

#[derive(Deserialize)]
struct EventHead<'a> {
    #[serde(borrow, rename = "type")]
    kind: Cow<'a, str>,
    #[serde(borrow)]
    session_id: Cow<'a, str>,
    seq: u64,
}

impl Frame {
    /// The frame that `line` is, or what is wrong with it.
    ///
    /// # Errors
    /// A sentence that says which promise the line breaks.
    pub fn parse(line: String) -> Result<Self, String> {
        if !line.starts_with(r#"{"type":"#) {
            return Err("a frame begins with its type".into());
        }
        let head: Head<'_> =
            serde_json::from_str(&line).map_err(|error| format!("not a frame: {error}"))?;
        if head.host_ns > monotonic_ns() {
            return Err("host_ns is later than CLOCK_MONOTONIC is now".into());
        }
        let event = match head.message {
            Some(message) if head.kind == "rpc" => event_of(message, head.sid.as_deref())?,
            None if head.kind == "rpc" => return Err("an rpc frame has a message".into()),
            _ => None,
        };
        Ok(Self {
            kind: head.kind.into_owned(),
            sid: head.sid.map(Cow::into_owned),
            request_id: head.request_id.map(|id| id.get().to_owned()),
            request_id_text: head
                .request_id
                .and_then(|id| serde_json::from_str(id.get()).ok()),
            host_ns: head.host_ns,
            event,
            value: OnceLock::new(),
            line,
        })
    }

    /// The line, without its end.
    #[must_use]
    pub fn line(&self) -> &str {
        &self.line
    }

    /// The `type`.
    #[must_use]
    pub fn kind(&self) -> &str {
        &self.kind
    }

    /// The `sid`, where it has one.
    #[must_use]
    pub fn sid(&self) -> Option<&str> {
        self.sid.as_deref()
    }

    /// The JSON text of the `request_id`, where it has one.
    #[must_use]
    pub fn request_id_json(&self) -> Option<&str> {
        self.request_id.as_deref()
    }

    /// The `request_id`, where it is text.
    #[must_use]
    pub fn request_id(&self) -> Option<&str> {
        self.request_id_text.as_deref()
    }

    /// Whether the `request_id` is the text `id`.
    #[must_use]
    pub fn answers(&self, id: &str) -> bool {
        self.request_id() == Some(id)
    }

    /// When the host wrote it, on CLOCK_MONOTONIC.
    #[must_use]
    pub fn host_ns(&self) -> u64 {
        self.host_ns
    }

    /// Whether it is the last frame of a turn.
    #[must_use]
    pub fn is_terminal(&self) -> bool {
        matches!(self.kind(), "turn.end" | "turn.error")
    }

    /// The type of the event inside, where it is one.
    #[must_use]
    pub fn event(&self) -> Option<&str> {
        self.event.as_ref().map(|event| event.kind.as_str())
    }

    /// The payload of the event inside; null where there is none.
    #[must_use]
    pub fn payload(&self) -> &Value {
        &self["message"]["params"]["payload"]
    }

    /// The frame as a value.
    ///
    /// # Panics
    /// A number in it has no place in a [`Value`]; look at [`Frame::line`] then.
    #[must_use]
    pub fn value(&self) -> &Value {
        self.value
            .get_or_init(|| serde_json::from_str(&self.line).expect("a frame fits into a value"))
    }
}

impl Index<&str> for Frame {
    type Output = Value;

    /// A field; null where it is missing.
    fn index(&self, field: &str) -> &Value {
        &self.value()[field]
    }
}

fn event_of(message: &RawValue, sid: Option<&str>) -> Result<Option<Event>, String> {
    let rpc: RpcHead<'_> = serde_json::from_str(message.get())
        .map_err(|error| format!("not a JSON-RPC message: {error}"))?;
    if rpc.jsonrpc != "2.0" {
        return Err("a message says jsonrpc 2.0".into());
    }
    if rpc.method != "event" {
        return Ok(None);
    }
    let event: EventHead<'_> =
        serde_json::from_str(rpc.params.get()).map_err(|error| format!("not an event: {error}"))?;
    if sid != Some(&*event.session_id) {
        return Err("the sid of an event's frame is its session_id".into());
    }
    Ok(Some(Event {
        kind: event.kind.into_owned(),
        seq: event.seq,
    }))
}

/// Checks what SPEC says of the frames of one host together: `hello` is first and comes once, and
/// the events of a session count up by one.
#[derive(Debug, Default)]
pub struct Order {
    last_seq: HashMap<String, u64>,
    closed: HashSet<String>,
    frames: u64,
}

impl Order {
    /// Takes the next frame.
    ///
    /// # Errors
    /// A sentence that says which promise it breaks.
    pub fn check(&mut self, frame: &Frame) -> Result<(), String> {
        self.frames += 1;
        if (self.frames == 1) != (frame.kind() == "hello") {
            return Err("hello comes first, and once".into());
        }
        let Some(sid) = frame.sid() else {
            return Ok(());
        };
        if frame.kind() == "session.close.ack" {
            self.closed.insert(sid.to_owned());
        }
        if let Some(event) = &frame.event {
            let last = self.last_seq.entry(sid.to_owned()).or_default();
            // A new session under the name of a closed one may count from the start.
            let may_restart = self.closed.remove(sid);
            if event.seq != *last + 1 && !(may_restart && event.seq == 1) {
                return Err(format!("seq {} comes after {last}", event.seq));
            }
            *last = event.seq;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Takes `lines` as one host's output; the first fault among them.
    fn fault(lines: &[&str]) -> Option<String> {
        let mut order = Order::default();
        lines.iter().find_map(|line| {
            let frame = Frame::parse((*line).to_owned());
            frame.and_then(|frame| order.check(&frame)).err()
        })
    }

    const HELLO: &str = r#"{"type":"hello","host_ns":1}"#;

    fn event(sid: &str, seq: u64) -> String {
        format!(
            r#"{{"type":"rpc","sid":"{sid}","message":{{"jsonrpc":"2.0","method":"event","params":{{"type":"x","session_id":"{sid}","seq":{seq}}}}},"host_ns":2}}"#
        )
    }

    #[test]
    fn a_broken_promise_is_seen() {
        let check = |lines: &[&str], expected: &str| {
            let fault = fault(lines).unwrap_or_default();
            assert!(fault.starts_with(expected), "{lines:?} gives {fault:?}");
        };
        check(&[HELLO, &event("a", 1), &event("b", 1), &event("a", 2)], "");
        check(
            &[HELLO, r#"{"host_ns":1,"type":"hb"}"#],
            "a frame begins with its type",
        );
        check(
            &[HELLO, r#"{"type":"hb"}"#],
            "not a frame: missing field `host_ns`",
        );
        check(&[HELLO, r#"{"type":"hb","host_ns":1"#], "not a frame: EOF");
        check(
            &[HELLO, r#"{"type":"hb","host_ns":18446744073709551615}"#],
            "host_ns is later",
        );
        check(&[r#"{"type":"hb","host_ns":1}"#], "hello comes first");
        check(&[HELLO, HELLO], "hello comes first");
        check(&[HELLO, &event("a", 2)], "seq 2 comes after 0");
        check(
            &[HELLO, &event("a", 1), &event("a", 3)],
            "seq 3 comes after 1",
        );
        check(
            &[HELLO, &event("a", 1), &event("a", 1)],
            "seq 1 comes after 1",
        );
        check(
            &[
                HELLO,
                &event("a", 1).replacen(r#""sid":"a""#, r#""sid":"b""#, 1),
            ],
            "the sid of an event's frame",
        );
        check(
            &[HELLO, r#"{"type":"rpc","sid":"a","host_ns":1}"#],
            "an rpc frame has a message",
        );
    }

    #[test]
    fn a_closed_session_may_count_anew() {
        let closed = r#"{"type":"session.close.ack","sid":"a","host_ns":1}"#;
        let one = event("a", 1);
        assert_eq!(fault(&[HELLO, &one, closed, &one]), None);
        assert_eq!(fault(&[HELLO, &one, closed, &event("a", 2)]), None);
        assert!(fault(&[HELLO, &one, closed, &event("a", 3)]).is_some());
    }
}

//! What the host writes: its hello, answers, questions, and the rest.

use std::borrow::Cow;
use std::path::{Path, PathBuf};

use serde::de::IgnoredAny;
use turnhost_protocol::frame::RequestId;
use turnhost_protocol::frame::output::{ExecutionState, Reason};
use turnhost_protocol::json::quoted;
use turnhost_protocol::limits::{self, PROTOCOL_VERSION};
use turnhost_protocol::look::{Look, look, members, text};

use super::gateway::addressee;
use super::notice::Notice;
use super::pending::{Kind, MAX_QUESTION_BYTES, Question, Settled, request_id};
use super::watchdog::Watchdog;
use super::{Action, Core, Drain, Level, Nanos, Phase, from_ms};

/// What a hello is read for.
struct Hello {
    boot_id: String,
    build_sha: String,
    home: String,
    hermes_home: String,
    version: String,
    protocol_version: Option<f64>,
    heartbeat_secs: Option<f64>,
}

impl Hello {
    /// Reads a line that is JSON as SPEC §2 reads frames: `null` is absent, the last of equal keys
    /// counts, numbers and the text of their digits are the same. The error names the field.
    fn read(line: &[u8]) -> Result<Self, &'static str> {
        let [home, hermes_home, boot_id, build_sha, version] = members(
            line,
            ["home", "hermes_home", "boot_id", "build_sha", "version"],
        );
        let [protocol_version, heartbeat_secs] =
            members(line, ["protocol_version", "heartbeat_secs"]);
        Ok(Self {
            boot_id: name(boot_id).ok_or("boot_id must be text")?,
            build_sha: name(build_sha).ok_or("build_sha must be text")?,
            home: name(home).ok_or("home must be text")?,
            hermes_home: name(hermes_home).ok_or("hermes_home must be text")?,
            version: name(version).ok_or("version must be text")?,
            protocol_version: match present(protocol_version) {
                None => None,
                Some(raw) => Some(number(raw).ok_or("protocol_version must be a number")?),
            },
            // Without one that is of use the supervisor's own counts.
            heartbeat_secs: present(heartbeat_secs).and_then(number),
        })
    }
}

fn present(raw: Option<&[u8]>) -> Option<&[u8]> {
    raw.filter(|raw| *raw != b"null")
}

/// Text, or the digits of a number; absent is empty.
fn name(raw: Option<&[u8]>) -> Option<String> {
    let Some(raw) = present(raw) else {
        return Some(String::new());
    };
    let mut raw = raw.to_vec();
    turnhost_protocol::json::replace_lone_surrogates(&mut raw);
    let digits = || {
        serde_json::from_slice::<serde_json::Number>(&raw).ok()?;
        String::from_utf8(raw.clone()).ok()
    };
    text(&raw).map(Cow::into_owned).or_else(digits)
}

/// A number, or text that is one.
fn number(raw: &[u8]) -> Option<f64> {
    match text(raw) {
        Some(text) => text.trim().parse().ok(),
        None => serde_json::from_slice(raw).ok(),
    }
}

impl Core {
    pub(super) fn host_line(&mut self, line: &[u8], now: Nanos, actions: &mut Vec<Action>) {
        let look = look(line);
        let name = look.kind.and_then(text).filter(|_| is_json(line));
        let Some(name) = name else {
            let shown = quoted(&String::from_utf8_lossy(line), limits::MAX_QUOTED_BYTES);
            let message = format!("the host wrote a line that is no frame: {shown}");
            return actions.push(Action::Log(Level::Warning, message));
        };
        match self.phase {
            Phase::Starting { .. } => self.before_hello(&name, line, now, actions),
            Phase::Registering | Phase::Ready { .. } | Phase::Failed { .. } => {
                self.watchdog.saw_frame(&*name == "hb", now);
                if name == "hello" {
                    // To the gateway another hello is another host.
                    let message = "a hello that is not its host's first frame is dropped";
                    return actions.push(Action::Log(Level::Warning, message.to_owned()));
                }
                self.frame(&name, line, &look, now, actions);
            }
            Phase::Waiting { .. }
            | Phase::Spawning
            | Phase::Sweeping(_)
            | Phase::GaveUp { .. }
            | Phase::Over => {}
        }
    }

    /// A line that is too long is lost. Where its head shows that it was an answer, the frame that
    /// waits for it gets another one.
    pub(super) fn host_line_too_long(
        &mut self,
        head: &[u8],
        bytes: u64,
        now: Nanos,
        actions: &mut Vec<Action>,
    ) {
        let look = look(head);
        let name = look.kind.and_then(text).unwrap_or_default();
        let max = self.rules.max_frame_bytes;
        let message = format!(
            "the host wrote a {} of {bytes} bytes, longer than the limit of {max} bytes",
            if name.is_empty() { "line" } else { &name },
        );
        actions.push(Action::Log(Level::Error, message.clone()));
        if !self.said_hello() {
            return;
        }
        self.watchdog.saw_frame(false, now);
        let (id, sid) = (request_id(look.request_id()), look.sid());
        let Some(kind) = Kind::of_answer(&name) else {
            return;
        };
        if let Settled::Owed(owed) = self.pending.settle(kind, id.as_ref(), sid.as_deref()) {
            actions.push(Action::Tell(Notice::Refused {
                to: addressee(owed.kind, owed.id.or(id), owed.sid),
                reason: Reason::Exception,
                state: ExecutionState::Unknown,
                message,
            }));
        }
    }

    fn said_hello(&self) -> bool {
        match self.phase {
            Phase::Registering | Phase::Ready { .. } => true,
            Phase::Failed { hello_at, .. } => hello_at.is_some(),
            _ => false,
        }
    }

    fn before_hello(&mut self, name: &str, line: &[u8], now: Nanos, actions: &mut Vec<Action>) {
        if name != "hello" {
            let name = quoted(name, limits::MAX_QUOTED_BYTES);
            let message = format!("the host wrote {name} before its hello; it is dropped");
            return actions.push(Action::Log(Level::Warning, message));
        }
        let hello = match Hello::read(line) {
            Ok(hello) => hello,
            Err(error) => {
                return self.fail(
                    format!("the host's hello is malformed: {error}"),
                    now,
                    actions,
                );
            }
        };
        if let Err(message) = self.check_hello(&hello) {
            return self.fail(message, now, actions);
        }
        let own_version = env!("CARGO_PKG_VERSION");
        if !hello.version.is_empty() && hello.version != own_version {
            let message = format!(
                "the host has version {}, this supervisor {own_version}",
                quoted(&hello.version, limits::MAX_QUOTED_BYTES)
            );
            actions.push(Action::Log(Level::Warning, message));
        }
        self.watchdog = Watchdog::new(interval(hello.heartbeat_secs, self.rules.heartbeat));
        self.phase = Phase::Registering;
        actions.push(Action::RelayToGateway);
        actions.push(Action::Register {
            boot_id: hello.boot_id,
            build_sha: hello.build_sha,
        });
    }

    fn check_hello(&self, hello: &Hello) -> Result<(), String> {
        if hello
            .protocol_version
            .is_some_and(|version| version != f64::from(PROTOCOL_VERSION))
        {
            return Err(format!(
                "the host speaks protocol version {}, this supervisor {PROTOCOL_VERSION}; \
                 install a pair that belongs together",
                hello.protocol_version.unwrap_or_default()
            ));
        }
        let home = if hello.home.is_empty() {
            &hello.hermes_home
        } else {
            &hello.home
        };
        let own = &self.rules.homes;
        if !home.is_empty() && !own.iter().any(|own| own == Path::new(home)) {
            return Err(format!(
                "the host uses the home {}, this supervisor {}; start both with the same --home",
                quoted(home, limits::MAX_QUOTED_BYTES),
                own.first()
                    .map_or(Path::new(""), PathBuf::as_path)
                    .display()
            ));
        }
        let matches_all = |sha: &str| sha.is_empty() || sha == "unknown";
        let expected = &self.rules.build_sha;
        if !matches_all(&hello.build_sha) && !matches_all(expected) && hello.build_sha != *expected
        {
            return Err(format!(
                "the host is build {}, expected was {expected}; install the expected one",
                quoted(&hello.build_sha, limits::MAX_QUOTED_BYTES)
            ));
        }
        Ok(())
    }

    /// The record is written: the host may be sent what was kept.
    pub(super) fn registered(
        &mut self,
        result: Result<(), String>,
        now: Nanos,
        actions: &mut Vec<Action>,
    ) {
        if !matches!(self.phase, Phase::Registering) {
            return;
        }
        if let Err(message) = result {
            return self.fail(message, now, actions);
        }
        self.phase = Phase::Ready { hello_at: now };
        self.had_host = true;
        self.trouble.clear();
        if self.drain.is_some_and(|drain| drain != Drain::AfterHello) {
            // What is kept is answered when the host has ended.
            return;
        }
        self.kept_bytes = 0;
        for kept in std::mem::take(&mut self.kept) {
            self.note_sent(kept.serial, &kept.line, now);
            actions.push(Action::SendToHost(kept.line));
        }
        if self.gateway_closed {
            self.close_host_input(now, actions);
        }
    }

    fn frame(
        &mut self,
        name: &str,
        line: &[u8],
        look: &Look<'_>,
        now: Nanos,
        actions: &mut Vec<Action>,
    ) {
        if name == "rpc" {
            self.note_question(line, look);
            return actions.push(Action::RelayToGateway);
        }
        let answers = Kind::of_answer(name);
        if answers.is_none() && name != "error" && name != "turn.accepted" {
            return actions.push(Action::RelayToGateway);
        }
        let (id, sid) = (request_id(look.request_id()), look.sid());
        let Some(kind) = answers else {
            return if name == "error" {
                self.error_frame(line, id.as_ref(), sid.as_deref(), now, actions);
            } else {
                if let Some(id) = self.short_id(look.request_id()) {
                    self.pending.adopt(id, sid.as_deref());
                }
                actions.push(Action::RelayToGateway);
            };
        };
        match self.pending.settle(kind, id.as_ref(), sid.as_deref()) {
            Settled::Owed(owed) => {
                if kind == Kind::Shutdown {
                    self.shutdown_accepted(now);
                }
                if let Some(answered) = owed.answered
                    && is_settled(line, answered.is_lock)
                {
                    self.questions.close(&answered.request);
                }
            }
            Settled::Repeated => {
                let message =
                    format!("the host answered a frame twice; the second {name} is dropped");
                return actions.push(Action::Log(Level::Warning, message));
            }
            Settled::Unknown => {}
        }
        actions.push(Action::RelayToGateway);
    }

    fn error_frame(
        &mut self,
        line: &[u8],
        id: Option<&RequestId>,
        sid: Option<&str>,
        now: Nanos,
        actions: &mut Vec<Action>,
    ) {
        match self.pending.settle_by_error(id, sid) {
            Some(owed) if owed.kind == Kind::Turn => {
                let [message] = members(line, ["message"]);
                let message = message.and_then(text).map(Cow::into_owned);
                actions.push(Action::Tell(Notice::Refused {
                    to: addressee(Kind::Turn, owed.id, owed.sid),
                    reason: Reason::Invalid,
                    state: ExecutionState::Unknown,
                    message: message.unwrap_or_else(|| "the host refused the turn".to_owned()),
                }));
            }
            settled => {
                actions.push(Action::RelayToGateway);
                if let Some(owed) = settled
                    && owed.kind == Kind::Shutdown
                {
                    self.shutdown_refused(owed.offset, now, actions);
                }
            }
        }
    }

    /// Looks for a question to the person, or the end of one, in an `rpc` frame.
    fn note_question(&mut self, line: &[u8], look: &Look<'_>) {
        let [message] = members(line, ["message"]);
        let Some(message) = message else { return };
        let [id, method, params] = members(message, ["id", "method", "params"]);
        let (Some(method), Some(params)) = (method.and_then(text), params) else {
            return;
        };
        if let Some(id) = id.and_then(text) {
            let [session] = members(params, ["session_id"]);
            // The reference leaves `sid` empty on its requests.
            let sid = look.sid().filter(|sid| !sid.is_empty());
            let session = || session.and_then(text).map(Cow::into_owned);
            let question = Question {
                id: id.into_owned(),
                sid: sid.or_else(session).unwrap_or_default(),
                method: method.into_owned(),
            };
            let parts = [&question.id, &question.sid, &question.method];
            if parts.iter().all(|part| part.len() <= MAX_QUESTION_BYTES) {
                self.questions.ask(question);
            }
        } else if memchr::memmem::find(params, b"request.cancel").is_some() {
            let [kind, payload] = members(params, ["type", "payload"]);
            let [id] = payload.map_or([None], |payload| members(payload, ["id"]));
            if kind.and_then(text).as_deref() == Some("request.cancel")
                && let Some(id) = id.and_then(text)
            {
                self.questions.close(&id);
            }
        }
    }
}

/// Whether the bytes are one JSON value in UTF-8.
fn is_json(line: &[u8]) -> bool {
    std::str::from_utf8(line).is_ok_and(|line| serde_json::from_str::<IgnoredAny>(line).is_ok())
}

/// Whether a `respond.ack` ends its question: the last lock of a batch does, others do not.
fn is_settled(ack: &[u8], is_lock: bool) -> bool {
    let [response] = members(ack, ["response"]);
    let [result] = response.map_or([None], |response| members(response, ["result"]));
    let Some(result) = result else { return false };
    let [status, remaining] = members(result, ["status", "remaining"]);
    let is_ok = status.and_then(text).as_deref() == Some("ok");
    let is_last = || {
        let inner = remaining.and_then(|raw| raw.strip_prefix(b"[")?.strip_suffix(b"]"));
        inner.is_some_and(|inner| inner.iter().all(u8::is_ascii_whitespace))
    };
    is_ok && (!is_lock || is_last())
}

/// The interval between heartbeats that a hello names, else the supervisor's own.
fn interval(heartbeat_secs: Option<f64>, own: Nanos) -> Nanos {
    let longest = limits::MAX_HEARTBEAT_SECS * 1_000;
    match heartbeat_secs {
        Some(secs) if secs.is_finite() && secs >= 0.0 => {
            // Zero turns them off; less than the least would make each pause a hang.
            let secs = if secs > 0.0 {
                secs.max(limits::MIN_HEARTBEAT_SECS)
            } else {
                secs
            };
            // A float becomes the nearest whole number that fits.
            from_ms(((secs * 1_000.0) as u64).min(longest))
        }
        _ => own,
    }
}

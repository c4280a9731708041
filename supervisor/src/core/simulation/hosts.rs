//! What hosts do in a history: work, answer, answer wrongly, end.

use super::*;

impl World {
    pub(super) fn host_event(&mut self) {
        let Some(host) = &mut self.host else {
            return;
        };
        if !host.running || host.stuck {
            return;
        }
        if let Some(exit) = host.dying
            && self.random.one_in(2)
        {
            let _ = exit;
            return self.exit();
        }
        if !host.accepted && host.hello_at.is_none() {
            let line = match self.random.below(40) {
                0 => r#"{"type":"hello","protocol_version":2}"#,
                1 => r#"{"type":"hello","home":"/home/b"}"#,
                2 => r#"{"type":"hello","boot_id":[]}"#,
                3 => "junk",
                4 => r#"{"type":"hb"}"#,
                5 => return self.exit_by_itself(),
                _ => {
                    host.hello_at = Some(self.now);
                    r#"{"type":"hello","home":"/home/a","boot_id":"b","heartbeat_secs":15}"#
                }
            };
            return self.step(Event::HostLine(line.as_bytes()));
        }
        match self.random.below(19) {
            16 if self.random.one_in(4) => self.step(Event::HostPipeClosed),
            17 => self.answer_too_long(),
            18 => {
                let hello = r#"{"type":"hello","home":"/home/a","boot_id":"b"}"#;
                self.step(Event::HostLine(hello.as_bytes()));
            }
            0 => self.exit_by_itself(),
            1 => self.step(Event::HostLine(br#"{"type":"hb"}"#)),
            2 => self.step(Event::HostLine(b"{\"type\":\"hb\"")),
            3 => self.repeat_answer(),
            4 => {
                let id = self.random.below(6);
                let name = format!("srq-{id}");
                if self.random.one_in(3) {
                    let line = json!({"type": "rpc", "sid": "s1", "message":
                        {"method": "event", "params":
                            {"type": "request.cancel", "payload": {"id": name}}}});
                    self.questions.remove(&name);
                    return self.step(Event::HostLine(line.to_string().as_bytes()));
                }
                self.questions.insert(name);
                let line = json!({"type": "rpc", "sid": "s1", "message":
                    {"id": format!("srq-{id}"), "method": "clarify", "params": {}}});
                self.step(Event::HostLine(line.to_string().as_bytes()));
            }
            _ => self.answer(),
        }
    }

    pub(super) fn exit_by_itself(&mut self) {
        let exit = match self.random.below(3) {
            0 => Exit::Code(0),
            1 => Exit::Code(3),
            _ => Exit::Signal(11),
        };
        if let Some(host) = &mut self.host {
            host.dying = Some(exit);
        }
        self.exit();
    }

    /// The host's process ends; a part of what it was sent was written to it.
    pub(super) fn exit(&mut self) {
        let Some(host) = &mut self.host else { return };
        host.running = false;
        let exit = host.dying.unwrap_or(Exit::Code(0));
        let read: u64 = host.total - host.inbox_bytes();
        let written = read + self.random.below(host.total - read + 1);
        for (offset, line) in &host.sent {
            if *offset < written {
                self.begun.insert(line.clone());
            }
        }
        if host
            .hello_at
            .is_some_and(|at| self.now - at >= from_ms(limits::STABLE_MS))
        {
            self.restarts.clear();
        }
        self.step(Event::HostExited { exit, written });
        assert!(self.questions.is_empty(), "a question outlives its host");
    }

    pub(super) fn answer(&mut self) {
        let Some(host) = &mut self.host else { return };
        let Some(mut work) = host.inbox.pop_front() else {
            return;
        };
        if self.random.one_in(8) {
            // Answered out of order, or never.
            host.inbox.push_back(work);
            return;
        }
        if work.id.is_none() && work.kind == "turn.start" && self.random.one_in(2) {
            self.next_id += 1;
            let made = format!("made {}", self.next_id);
            let line =
                json!({"type": "turn.accepted", "sid": work.sid, "request_id": made}).to_string();
            work.id = Some(made);
            self.step(Event::HostLine(line.as_bytes()));
        }
        let line = self.answer_line(&work);
        if let Some(host) = &mut self.host {
            host.answered.push(work);
        }
        self.step(Event::HostLine(line.as_bytes()));
    }

    /// An answer that is too long is lost, but not the one that is owed.
    pub(super) fn answer_too_long(&mut self) {
        let Some(host) = &mut self.host else { return };
        let Some(work) = host.inbox.pop_front() else {
            return;
        };
        host.answered.push(work.clone());
        let line = self.answer_line(&work);
        let head = line.trim_end_matches('}').as_bytes();
        let mut head = head.to_vec();
        head.extend_from_slice(b",\"text\":\"xx");
        self.step(Event::HostLineTooLong {
            head: &head,
            bytes: 9_999,
        });
    }

    pub(super) fn answer_line(&mut self, work: &Work) -> String {
        let is_error = work.id.is_some() && self.random.one_in(6);
        let kind = if is_error {
            "error"
        } else {
            answer_of(work.kind)
        };
        let id = match &work.id {
            Some(id) => id.clone(),
            None => {
                self.next_id += 1;
                format!("made {}", self.next_id)
            }
        };
        json!({"type": kind, "sid": work.sid, "request_id": id}).to_string()
    }

    /// A faulty host answers a frame for a second time.
    pub(super) fn repeat_answer(&mut self) {
        let Some(host) = &self.host else { return };
        let named = host.answered.iter().filter(|work| work.kind != "other");
        let named: Vec<Work> = named.filter(|work| work.id.is_some()).cloned().collect();
        if named.is_empty() {
            return;
        }
        let work = self.random.pick(&named).clone();
        let id = work.id.clone().unwrap_or_default();
        // An id that still lives elsewhere cannot be told from a first answer.
        if self
            .owed
            .get(&(work.kind, id.clone()))
            .is_some_and(|count| *count > 0)
        {
            return;
        }
        let line = json!({"type": answer_of(work.kind), "sid": work.sid, "request_id": id});
        self.step(Event::HostLine(line.to_string().as_bytes()));
    }
}

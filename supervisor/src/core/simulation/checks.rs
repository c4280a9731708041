//! What the core makes of a history, and what must hold of it.

use super::*;

impl World {
    /// One step of the core, and all that follows from its actions.
    pub(super) fn step(&mut self, event: Event<'_>) {
        assert!(self.over.is_none(), "an event after the end");
        let line = match &event {
            Event::GatewayLine(line) | Event::HostLine(line) => {
                String::from_utf8_lossy(line).into_owned()
            }
            _ => String::new(),
        };
        let mut actions = Vec::new();
        if self.shown {
            eprintln!("{} ms: {event:?} {line}", self.now / from_ms(1));
        }
        self.core.step(event, self.now, &mut actions);
        if self.shown {
            eprintln!("    {actions:?}");
        }
        for action in actions {
            self.act(action, &line);
        }
    }

    pub(super) fn act(&mut self, action: Action, line: &str) {
        assert!(self.over.is_none(), "{action:?} after the end");
        match action {
            Action::RelayToHost => self.deliver(line),
            Action::SendToHost(line) => self.deliver(&String::from_utf8_lossy(&line)),
            Action::CloseHostInput => {
                let host = self.running_host();
                assert!(!host.input_closed);
                host.input_closed = true;
                if !host.deaf && !host.stuck {
                    host.dying.get_or_insert(Exit::Code(0));
                }
            }
            Action::RelayToGateway => self.hear_line(line),
            Action::Tell(notice) => self.hear_notice(notice),
            Action::Spawn => self.spawn(),
            Action::Register { .. } => {
                let result = if self.random.one_in(20) {
                    Err("no space".to_owned())
                } else {
                    self.running_host().accepted = true;
                    Ok(())
                };
                self.step(Event::Registered(result));
            }
            Action::SignalHost(signal) => {
                let host = self.running_host();
                match signal {
                    Signal::Kill if host.unkillable => {
                        host.stuck = true;
                        host.dying = None;
                    }
                    Signal::Kill => {
                        host.killed = true;
                        host.dying = Some(Exit::Signal(9));
                    }
                    Signal::Terminate if !host.deaf && !host.stuck => {
                        host.dying.get_or_insert(Exit::Code(0));
                    }
                    Signal::Terminate | Signal::Continue => {}
                }
            }
            Action::SignalSession(signal) => {
                let random = self.random.below(3) as usize;
                let host = self.ended_host();
                host.session = match signal {
                    Signal::Kill => 0,
                    _ => host.session.saturating_sub(random),
                };
                let left = host.session;
                self.step(Event::SessionLeft(left));
            }
            Action::CountSession => {
                let left = self.ended_host().session;
                self.step(Event::SessionLeft(left));
            }
            Action::Reap => {
                self.ended_host();
                self.host = None;
            }
            Action::Log(..) => {}
            Action::End(code) => self.over = Some(code),
        }
    }

    pub(super) fn running_host(&mut self) -> &mut Host {
        let host = self.host.as_mut().expect("there is a host");
        assert!(host.running, "an ended host is signalled or written to");
        host
    }

    pub(super) fn ended_host(&mut self) -> &mut Host {
        let host = self.host.as_mut().expect("the host is not reaped");
        assert!(!host.running, "a session is ended under its host");
        host
    }

    pub(super) fn spawn(&mut self) {
        assert!(self.host.is_none(), "a second host beside the first");
        if self.had_spawn && !self.asked_restart {
            let window = from_ms(self.core.rules.respawn.window_ms);
            self.restarts.push_back(self.now);
            while self
                .restarts
                .front()
                .is_some_and(|at| at + window <= self.now)
            {
                self.restarts.pop_front();
            }
            let max = self.core.rules.respawn.max;
            assert!(self.restarts.len() <= max, "more restarts than {max}");
        } else {
            self.restarts.clear();
        }
        self.asked_restart = false;
        self.had_spawn = true;
        if self.random.one_in(20) {
            let message = "no such file".to_owned();
            return self.step(Event::SpawnFailed { message });
        }
        self.host = Some(Host {
            accepted: false,
            running: true,
            deaf: self.random.one_in(4),
            unkillable: self.random.one_in(50),
            stuck: false,
            killed: false,
            greeted: false,
            dying: None,
            input_closed: false,
            sent: Vec::new(),
            total: 0,
            inbox: VecDeque::new(),
            answered: Vec::new(),
            session: self.random.below(3) as usize,
            hello_at: None,
        });
        self.step(Event::Spawned);
    }

    pub(super) fn deliver(&mut self, line: &str) {
        let numbered = line.contains("\"n\":") || line.starts_with("junk");
        assert!(
            !numbered || self.delivered.insert(line.to_owned()),
            "{line} is sent a second time"
        );
        let mut frame: Value = serde_json::from_str(line).unwrap_or(Value::Null);
        if let Some(whole) = line.strip_suffix(", broken") {
            frame = serde_json::from_str(&format!("{whole}}}")).expect("a frame but for its end");
            if frame["type"] != "turn.start" {
                frame["type"] = json!("other");
            }
        } else if frame["wait_ms"].is_string() {
            frame["type"] = json!("other");
        }
        let max_id = limits::max_request_id_bytes(limits::MIN_MAX_FRAME_BYTES);
        let host = self.running_host();
        assert!(host.accepted, "{line} is sent before hello");
        assert!(!host.input_closed, "{line} is sent after the end of input");
        host.sent.push((host.total, line.to_owned()));
        host.total += line.len() as u64 + 1;
        if let Some(kind) = frame["type"].as_str().filter(|kind| *kind != "hello.ack") {
            let text = |key: &str| frame[key].as_str().map(str::to_owned);
            host.inbox.push_back(Work {
                kind: TYPES
                    .iter()
                    .chain(&["shutdown", "other"])
                    .find(|known| **known == kind)
                    .expect("a known type"),
                id: text("request_id").filter(|id| id.len() + 2 <= max_id),
                sid: text("sid").unwrap_or_default(),
            });
        }
    }

    /// Counts an answer.
    pub(super) fn settle(&mut self, kind: &'static str, id: &str, sid: &str) {
        let named = self.owed.get_mut(&(kind, id.to_owned()));
        let count = match named {
            Some(count) => Some(count),
            None => self.owed.get_mut(&(kind, format!("nameless {sid}"))),
        };
        match count {
            Some(count) if *count > 0 => *count -= 1,
            _ => panic!("a second answer to {kind} {id} of {sid}, or one to nothing"),
        }
    }

    pub(super) fn hear_line(&mut self, line: &str) {
        let frame: Value = serde_json::from_str(line).expect("a frame");
        let text = |key: &str| frame[key].as_str().unwrap_or_default().to_owned();
        let (kind, id, sid) = (text("type"), text("request_id"), text("sid"));
        if kind == "hello" {
            let host = self.running_host();
            assert!(!host.greeted, "a second hello of one host");
            host.greeted = true;
        }
        if kind == "error" {
            // Two frames of one id are a turn and another one: an error is for the other.
            let owed = self
                .owed
                .iter()
                .find(|((kind, name), count)| *name == id && **count > 0 && *kind != "turn.start");
            let kind = owed.map(|((kind, _), _)| *kind);
            return self.settle(kind.expect("no error for a turn"), &id, &sid);
        }
        let answered = TYPES
            .iter()
            .chain(&["shutdown"])
            .find(|known| answer_of(known) == kind);
        if let Some(answered) = answered {
            self.settle(answered, &id, &sid);
        }
    }

    pub(super) fn hear_notice(&mut self, notice: Notice) {
        match notice {
            Notice::Refused { to, state, .. } => {
                let id = to.id.as_json().trim_matches('"').to_owned();
                let is_certain = state == ExecutionState::NotStarted;
                // An id that two turns share says nothing of either.
                if to.kind == Kind::Turn && is_certain && !self.shared.contains(&id) {
                    let quoted = format!("\"{id}\"");
                    let begun = self.begun.iter().any(|line| line.contains(&quoted));
                    assert!(!begun, "{id} had begun");
                }
                let is_junk = to.kind == Kind::Other && id.len() == 32;
                if !is_junk {
                    self.settle(kind_name(to.kind), &id, &to.sid);
                }
            }
            Notice::Interrupted { to, .. } | Notice::InterruptAck { to, .. } => {
                let id = to.id.as_json().trim_matches('"').to_owned();
                self.settle(kind_name(to.kind), &id, &to.sid);
            }
            Notice::TooLong { id, .. } => {
                let id = id.expect("its head shows an id");
                self.settle("other", id.as_json().trim_matches('"'), "");
            }
            Notice::Withdrawn { id, .. } => {
                assert!(self.questions.remove(&id), "{id} was not open");
            }
            Notice::GaveUp { .. }
            | Notice::SessionInfo { .. }
            | Notice::ErrorEvent { .. }
            | Notice::Exited { .. } => {}
        }
    }
}

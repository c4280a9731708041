//! A turn from its place in the queue to its terminal frame.
//!
//! May use `agent` and everything below it.
//!
//! Invariant: each way through [`Turns::run`] ends in exactly one call of [`Sessions::settle`], also a
//! panic; who settles first, wins, and a turn that lost says nothing more.

use std::any::Any;
use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use turnhost_protocol::config::{AgentName, Config};
use turnhost_protocol::frame::input::{Prompt, TurnStart};
use turnhost_protocol::frame::output::{Output as Frame, Reason};
use turnhost_protocol::home::Home;
use turnhost_protocol::process::monotonic_ns;
use turnhost_protocol::rpc::{Event, Message, MessageComplete, Status};

use crate::agent::script::ScriptAgent;
use crate::agent::{Agent, AgentError, Stage, Task};
use crate::pool::Place;
use crate::session::{Profile, Sessions, Setup, Terminal, Turn};
use crate::timers::Timers;

/// Time between two activity frames of a turn: SPEC §4.
const ACTIVITY_INTERVAL: Duration = Duration::from_secs(1);

/// What all turns of a host share.
pub struct Turns {
    sessions: Sessions,
    timers: Timers,
    agents: Agents,
    cwd: PathBuf,
}

/// Which agent a profile uses.
pub struct Agents {
    /// The home of the host, whose profile is the default one.
    pub home: PathBuf,
    /// `--agent`; wins over every profile's config.
    pub flag: Option<AgentName>,
    /// The script agent.
    pub script: Arc<ScriptAgent>,
    /// What the configs said, by home.
    pub configured: Mutex<HashMap<Arc<Path>, AgentName>>,
}

impl Agents {
    /// The agent of `profile`.
    ///
    /// # Errors
    /// Its config cannot be used, or names an agent that this version does not have.
    fn of(&self, profile: &Profile) -> Result<Arc<dyn Agent>, String> {
        match self.flag.map_or_else(|| self.configured(profile), Ok)? {
            AgentName::Script => Ok(Arc::clone(&self.script) as Arc<dyn Agent>),
            AgentName::Chat => Err(NO_CHAT.to_owned()),
        }
    }

    fn configured(&self, profile: &Profile) -> Result<AgentName, String> {
        if let Some(name) = self.configured.lock().get(&profile.home) {
            return Ok(*name);
        }
        let path = profile.home.join("config.yaml");
        let config = Config::read(&path).map_err(|error| error.to_string())?;
        let name = config.agent.unwrap_or(AgentName::Script);
        self.configured
            .lock()
            .insert(Arc::clone(&profile.home), name);
        Ok(name)
    }
}

/// Said where the agent `chat` is asked for.
pub const NO_CHAT: &str = "the agent `chat` is not supported by this version; use `script`";

impl Turns {
    /// Turns of `sessions`, which run in `cwd` where they do not say.
    #[must_use]
    pub fn new(sessions: Sessions, timers: Timers, agents: Agents, cwd: PathBuf) -> Self {
        Self {
            sessions,
            timers,
            agents,
            cwd,
        }
    }

    /// Runs `turn` on `place`: SPEC §5.2.
    pub fn run(&self, turn: &Arc<Turn>, start: TurnStart, place: &Place) {
        let outcome = catch_unwind(AssertUnwindSafe(|| {
            self.run_to_terminal(turn, start, place)
        }));
        let terminal = outcome.unwrap_or_else(|panic| Terminal::Error {
            reason: Reason::Panic,
            message: format!("the turn panicked: {}", panic_text(&*panic)),
        });
        self.sessions.settle(turn, terminal);
    }

    fn run_to_terminal(&self, turn: &Arc<Turn>, mut start: TurnStart, place: &Place) -> Terminal {
        const NOT_RUN: Terminal = Terminal::End { interrupted: true };
        let invalid = |message| Terminal::Error {
            reason: Reason::Invalid,
            message,
        };

        if turn.cancel.is_set() || self.sessions.is_outdated(turn) {
            return NOT_RUN;
        }
        let profile = match self.profile(turn, &start) {
            Ok(profile) => profile,
            Err(message) => return invalid(message),
        };
        let agent = match self.agents.of(&profile) {
            Ok(agent) => agent,
            Err(message) => return invalid(message),
        };
        turn.conversation.prepare(&mut start, || Setup {
            profile,
            cwd: self.cwd.clone(),
            model: agent.model().to_owned(),
        });
        let task = Task {
            prompt: start.prompt,
            history: turn.conversation.history(),
        };
        let run = match agent.prepare(&task) {
            Ok(run) => run,
            Err(error) => return invalid(error.to_string()),
        };
        // What came meanwhile, a higher generation too, still finds the turn unstarted.
        if turn.cancel.is_set() || self.sessions.is_outdated(turn) {
            return NOT_RUN;
        }

        turn.set_started();
        self.announce(turn);
        let stage = Stage::new(turn, place);
        let outcome = catch_unwind(AssertUnwindSafe(|| run(&stage)));
        // The copy of the history goes first, so that adding to the original copies nothing.
        let Task { prompt, history } = task;
        drop(history);
        self.finish(turn, &prompt, &stage, outcome)
    }

    /// Sends `turn.started` and `message.start`, and sees to activity frames.
    fn announce(&self, turn: &Arc<Turn>) {
        let started = Frame::TurnStarted {
            sid: &turn.sid,
            request_id: &turn.request_id,
            started_ns: monotonic_ns(),
        };
        // A turn that got its terminal frame meanwhile is told at its next step.
        let _ = turn.port.frame(&started, || turn.hurries());
        let _ = turn.port.event(Event::MessageStart, || turn.hurries());
        if turn.turn_id.is_some() {
            self.watch_activity(Arc::clone(turn), Instant::now() + ACTIVITY_INTERVAL);
        }
    }

    fn watch_activity(&self, turn: Arc<Turn>, at: Instant) {
        let (sessions, timers) = (self.sessions.clone(), self.timers.clone());
        self.timers
            .at(at, move || tell_activity(sessions, timers, turn, at));
    }

    /// Keeps the exchange and sends `message.complete`; answers the terminal frame.
    fn finish(
        &self,
        turn: &Turn,
        prompt: &Prompt,
        stage: &Stage<'_>,
        outcome: std::thread::Result<Result<crate::agent::Answer, AgentError>>,
    ) -> Terminal {
        let streamed = stage.streamed();
        let (text, status, terminal) = match outcome {
            Ok(Ok(answer)) => (
                answer.text,
                Some(Status::Complete),
                Terminal::End { interrupted: false },
            ),
            Ok(Err(AgentError::Interrupted)) => (
                None,
                Some(Status::Interrupted),
                Terminal::End { interrupted: true },
            ),
            Ok(Err(AgentError::Failed(message))) => (
                None,
                None,
                Terminal::Error {
                    reason: Reason::Exception,
                    message,
                },
            ),
            Err(panic) => {
                let message = format!("the turn panicked: {}", panic_text(&*panic));
                (
                    None,
                    None,
                    Terminal::Error {
                        reason: Reason::Panic,
                        message,
                    },
                )
            }
        };
        if !self.sessions.is_live(turn) {
            // It was given up; what it says now belongs to no turn.
            return terminal;
        }
        let is_streamed = text.is_none();
        let text = text.unwrap_or(streamed.text);
        turn.conversation.add_exchange(prompt, &text);
        if let Some(status) = status {
            let complete = Event::MessageComplete(MessageComplete {
                text: text.into(),
                status,
                usage: &turn.conversation.usage(),
                error: None,
                error_surface: None,
                partial: status == Status::Interrupted,
                truncated: is_streamed && streamed.truncated,
            });
            let _ = turn.port.event(complete, || turn.hurries());
        }
        terminal
    }

    /// The profile of `start`; a conversation keeps the one that it began with.
    fn profile(&self, turn: &Turn, start: &TurnStart) -> Result<Profile, String> {
        if let Some(profile) = turn.conversation.profile() {
            return Ok(profile);
        }
        match &start.profile_home {
            None => Ok(Profile::default_of(&self.agents.home)),
            Some(home) if *home == self.agents.home => Ok(Profile::default_of(home)),
            Some(home) if !home.is_absolute() => Err(format!(
                "profile_home must be an absolute path, not {}",
                home.display()
            )),
            Some(home) => {
                Home::at(home)
                    .open()
                    .map_err(|error| format!("profile_home: {error}"))?;
                Ok(Profile::at(home))
            }
        }
    }
}

fn tell_activity(sessions: Sessions, timers: Timers, turn: Arc<Turn>, at: Instant) {
    let Some(turn_id) = &turn.turn_id else { return };
    if !sessions.is_live(&turn) {
        return;
    }
    let (sid, activity_ns) = (&*turn.sid, turn.progress_ns());
    turn.port.activity(&Frame::Rpc {
        sid,
        message: Message::Activity {
            sid,
            turn_id,
            activity_ns,
        },
    });
    let (next, again) = (at + ACTIVITY_INTERVAL, timers.clone());
    timers.at(next, move || tell_activity(sessions, again, turn, next));
}

fn panic_text(panic: &(dyn Any + Send)) -> &str {
    panic
        .downcast_ref::<&str>()
        .copied()
        .or_else(|| panic.downcast_ref::<String>().map(String::as_str))
        .unwrap_or("no message")
}

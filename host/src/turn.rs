//! A turn from its place in the queue to its terminal frame.
//!
//! May use `agent` and everything below it.
//!
//! Invariant: each way through [`Turns::run`] ends in exactly one call of [`Sessions::settle`], also a
//! panic; who settles first, wins, and a turn that lost says nothing more.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

use turnhost_protocol::config::{AgentName, Config};
use turnhost_protocol::frame::input::{Prompt, TurnStart};
use turnhost_protocol::frame::output::{Output as Frame, Reason};
use turnhost_protocol::home::Home;
use turnhost_protocol::json;
use turnhost_protocol::limits::MAX_ERROR_MESSAGE_BYTES;
use turnhost_protocol::process::monotonic_ns;
use turnhost_protocol::rpc::{Event, Message, MessageComplete, Status};

use crate::agent::script::ScriptAgent;
use crate::agent::{Agent, AgentError, Stage, Task};
use crate::pool::Place;
use crate::session::{Exchange, Profile, Sessions, Setup, Terminal, Turn};
use crate::timers::Timers;

/// Time between two activity frames of a turn: SPEC §4.
const ACTIVITY_INTERVAL: Duration = Duration::from_secs(1);

/// What all turns of a host share.
pub struct Turns {
    sessions: Sessions,
    timers: Timers,
    agents: Agents,
    cwd: String,
}

/// Which agent a profile uses.
pub struct Agents {
    /// The home of the host, whose profile is the default one.
    pub home: Home,
    /// `--agent`; wins over every profile's config.
    pub flag: Option<AgentName>,
    /// The script agent.
    pub script: Arc<ScriptAgent>,
}

impl Agents {
    /// The agent of that name.
    ///
    /// # Errors
    /// This version does not have it.
    fn get(&self, name: AgentName) -> Result<Arc<dyn Agent>, String> {
        match name {
            AgentName::Script => Ok(Arc::clone(&self.script) as Arc<dyn Agent>),
            AgentName::Chat => Err(NO_CHAT.to_owned()),
        }
    }
}

/// Said where the agent `chat` is asked for.
pub const NO_CHAT: &str = "the agent `chat` is not supported by this version; use `script`";

impl Turns {
    /// Turns of `sessions`, which run in `cwd` where they do not say.
    #[must_use]
    pub fn new(sessions: Sessions, timers: Timers, agents: Agents, cwd: String) -> Self {
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
            message: panic_message(&*panic),
        });
        self.sessions.settle(turn, terminal);
    }

    fn run_to_terminal(&self, turn: &Arc<Turn>, mut start: TurnStart, place: &Place) -> Terminal {
        const NOT_RUN: Terminal = Terminal::End { interrupted: true };
        let invalid = |message| Terminal::Error {
            reason: Reason::Invalid,
            message,
        };

        if !self.sessions.may_begin(turn) {
            return NOT_RUN;
        }
        let agent = match self.prepare(turn, &mut start) {
            Ok(agent) => agent,
            Err(message) => return invalid(message),
        };
        let task = Task {
            prompt: start.prompt,
            history: turn.conversation.history(),
        };
        let run = match agent.prepare(&task) {
            Ok(run) => run,
            Err(error) => return invalid(error.to_string()),
        };
        // What came meanwhile still finds the turn unstarted.
        if !self.sessions.begin(turn) {
            return NOT_RUN;
        }
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
                let message = panic_message(&*panic);
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
        let is_streamed = text.is_none();
        let text = text.unwrap_or(streamed.text);
        if !self.sessions.keep(turn, Exchange::new(prompt, &text)) {
            // It was given up; what it says now belongs to no turn.
            return terminal;
        }
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

    /// Makes the conversation ready for `start`; answers the agent that runs it. A conversation
    /// keeps the profile and the agent that it began with.
    fn prepare(&self, turn: &Turn, start: &mut TurnStart) -> Result<Arc<dyn Agent>, String> {
        if let Some(name) = turn.conversation.agent() {
            turn.conversation.prepare(start, None);
            return self.agents.get(name);
        }
        let profile_home = match &start.profile_home {
            None => self.agents.home.clone(),
            Some(path) if path.is_absolute() => {
                let home = Home::at(path);
                home.open()
                    .map_err(|error| format!("profile_home: {error}"))?;
                home
            }
            Some(path) => {
                return Err(format!(
                    "profile_home must be an absolute path, not {}",
                    path.display()
                ));
            }
        };
        let profile = if profile_home == self.agents.home {
            Profile::default_of(profile_home.path())
        } else {
            Profile::at(profile_home.path())
        };
        let name = match self.agents.flag {
            Some(name) => name,
            None => {
                let config = Config::read(&profile_home.config()).map_err(|why| why.to_string())?;
                config.agent.unwrap_or(AgentName::Script)
            }
        };
        let agent = self.agents.get(name)?;
        let model = agent.model().to_owned();
        let setup = Setup {
            profile,
            cwd: self.cwd.clone(),
            agent: name,
            model,
        };
        turn.conversation.prepare(start, Some(setup));
        Ok(agent)
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
    // Those that were missed while the process was stopped are not made up for.
    let next = (at + ACTIVITY_INTERVAL).max(Instant::now());
    let again = timers.clone();
    timers.at(next, move || tell_activity(sessions, again, turn, next));
}

fn panic_message(panic: &(dyn Any + Send)) -> String {
    let text = panic
        .downcast_ref::<&str>()
        .copied()
        .or_else(|| panic.downcast_ref::<String>().map(String::as_str))
        .unwrap_or("no message");
    format!(
        "the turn panicked: {}",
        json::quoted(text, MAX_ERROR_MESSAGE_BYTES)
    )
}

//! What was said under a `session_key`, and the settings that go with it.

use std::path::Path;
use std::sync::Arc;

use parking_lot::Mutex;
use serde_json::value::RawValue;
use turnhost_protocol::config::AgentName;
use turnhost_protocol::frame::fields::text_of;
use turnhost_protocol::frame::input::{Prompt, TurnStart};
use turnhost_protocol::json;
use turnhost_protocol::rpc::{SessionInfo, Usage};

/// A home whose config, store and screen a session uses.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Profile {
    /// The folder.
    pub home: Arc<Path>,
    /// What gateways show.
    pub name: Arc<str>,
}

impl Profile {
    /// The host's own home.
    #[must_use]
    pub fn default_of(home: &Path) -> Self {
        Self {
            home: home.into(),
            name: "default".into(),
        }
    }

    /// The profile at `home`, named after its folder.
    #[must_use]
    pub fn at(home: &Path) -> Self {
        let name = home
            .file_name()
            .unwrap_or(home.as_os_str())
            .to_string_lossy();
        Self {
            home: home.into(),
            name: name.into(),
        }
    }
}

/// What a conversation begins with where its first turn does not say.
#[derive(Debug, Clone)]
pub struct Setup {
    /// The profile.
    pub profile: Profile,
    /// Where tools run.
    pub cwd: String,
    /// What runs its turns.
    pub agent: AgentName,
    /// Name of the model.
    pub model: String,
}

/// A conversation. Its lock is held for copying in and out, never while an agent runs.
pub struct Conversation {
    key: Arc<str>,
    state: Mutex<State>,
}

struct State {
    /// Whether a turn was prepared; before that the settings are those of the host.
    begun: bool,
    setup: Setup,
    usage: Usage,
    history: Arc<Vec<Box<RawValue>>>,
    version: u64,
}

impl Conversation {
    pub(super) fn new(key: Arc<str>, setup: Setup) -> Self {
        let usage = Usage {
            model: setup.model.clone(),
            ..Usage::default()
        };
        let state = State {
            begun: false,
            setup,
            usage,
            history: Arc::default(),
            version: 0,
        };
        Self {
            key,
            state: Mutex::new(state),
        }
    }

    /// The `session_key`.
    #[must_use]
    pub fn key(&self) -> &Arc<str> {
        &self.key
    }

    /// What runs its turns, once the first one was prepared.
    #[must_use]
    pub fn agent(&self) -> Option<AgentName> {
        let state = self.state.lock();
        state.begun.then_some(state.setup.agent)
    }

    /// Takes in what a turn brings: everything, with `setup`, when it is the first one of this
    /// conversation; later its `history` only with `replace_history`, and its model switch.
    pub fn prepare(&self, start: &mut TurnStart, setup: Option<Setup>) {
        let mut state = self.state.lock();
        let is_first = !std::mem::replace(&mut state.begun, true);
        if is_first {
            if let Some(setup) = setup {
                state.setup = setup;
            }
            if let Some(cwd) = start.cwd.take() {
                state.setup.cwd = cwd;
            }
            let named = start.model_override.as_deref().and_then(model_name);
            state.usage.model = named.unwrap_or_else(|| state.setup.model.clone());
        }
        if (is_first || start.replace_history)
            && let Some(history) = start.history.take()
        {
            state.history = Arc::new(history);
            state.version = start.history_version.unwrap_or(state.version);
        }
        if let Some(model) = start.pending_model_switch.as_deref().and_then(model_name) {
            state.usage.model = model;
        }
    }

    /// The messages so far; a copy that later turns do not change.
    #[must_use]
    pub fn history(&self) -> Arc<Vec<Box<RawValue>>> {
        Arc::clone(&self.state.lock().history)
    }

    /// Adds an exchange and counts it. Cheap as long as nobody holds a copy of the history.
    pub(super) fn add(&self, exchange: Exchange) {
        let mut state = self.state.lock();
        Arc::make_mut(&mut state.history).extend([exchange.question, exchange.answer]);
        state.version = state.version.saturating_add(1);
    }

    /// What model calls cost so far.
    #[must_use]
    pub fn usage(&self) -> Usage {
        self.state.lock().usage.clone()
    }

    /// Version of the history and number of its messages.
    #[must_use]
    pub fn version_and_count(&self) -> (u64, usize) {
        let state = self.state.lock();
        (state.version, state.history.len())
    }

    /// The session as gateways show it.
    #[must_use]
    pub fn info(&self, running: bool) -> SessionInfo {
        let state = self.state.lock();
        SessionInfo {
            model: state.usage.model.clone(),
            cwd: state.setup.cwd.clone(),
            running,
            title: String::new(),
            stored_session_id: self.key.to_string(),
            usage: state.usage.clone(),
            personality: String::new(),
            tools: Default::default(),
            mcp_servers: Vec::new(),
            profile_name: state.setup.profile.name.to_string(),
            version: env!("CARGO_PKG_VERSION"),
        }
    }
}

/// A prompt and what was answered, as messages.
pub struct Exchange {
    question: Box<RawValue>,
    answer: Box<RawValue>,
}

impl Exchange {
    /// The messages of `prompt` and `answer`.
    #[must_use]
    pub fn new(prompt: &Prompt, answer: &str) -> Self {
        #[derive(serde::Serialize)]
        struct Message<T> {
            role: &'static str,
            content: T,
        }
        let question = match prompt {
            Prompt::Text(text) => raw(&Message {
                role: "user",
                content: text,
            }),
            Prompt::Parts(parts) => raw(&Message {
                role: "user",
                content: parts,
            }),
        };
        Self {
            question,
            answer: raw(&Message {
                role: "assistant",
                content: answer,
            }),
        }
    }
}

fn raw(message: &impl serde::Serialize) -> Box<RawValue> {
    // Text and raw JSON always serialize.
    serde_json::value::to_raw_value(message).unwrap_or_else(|_| RawValue::NULL.to_owned())
}

/// The model that an override names: text, `{"model": …}`, or `{"raw": "MODEL --provider …"}`.
fn model_name(setting: &RawValue) -> Option<String> {
    let named = text_of(setting).or_else(|| {
        let members = json::members(setting)?;
        text_of(members.get("model").or_else(|| members.get("raw"))?)
    })?;
    named.split_whitespace().next().map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;
    use turnhost_protocol::frame::fields::Fields;
    use turnhost_protocol::frame::input::Input;

    fn start(fields: &str) -> TurnStart {
        let line = format!(r#"{{"type":"turn.start","sid":"s"{fields}}}"#);
        match Input::from_fields(&Fields::parse(&line, usize::MAX).unwrap()).unwrap() {
            Input::TurnStart(start) => *start,
            other => panic!("{other:?}"),
        }
    }

    fn setup() -> Setup {
        let profile = Profile::default_of(Path::new("/home/x/.turnhost"));
        Setup {
            profile,
            cwd: "/launch".into(),
            agent: AgentName::Script,
            model: "script".into(),
        }
    }

    #[test]
    fn the_first_turn_seeds_and_later_ones_replace_only_when_asked() {
        let conversation = Conversation::new("k".into(), setup());
        let two = r#","history":[{"role":"user"},{"role":"assistant"}],"history_version":4"#;
        conversation.prepare(&mut start(two), Some(setup()));
        assert_eq!(conversation.version_and_count(), (4, 2));
        conversation.prepare(
            &mut start(r#","history":[],"history_version":9"#),
            Some(setup()),
        );
        assert_eq!(conversation.version_and_count(), (4, 2));
        conversation.add(Exchange::new(&Prompt::Text("q".into()), "a\""));
        assert_eq!(conversation.version_and_count(), (5, 4));
        assert_eq!(
            conversation.history()[3].get(),
            r#"{"role":"assistant","content":"a\""}"#
        );
        let replace = r#","history":[{}],"history_version":9,"replace_history":true"#;
        conversation.prepare(&mut start(replace), Some(setup()));
        assert_eq!(conversation.version_and_count(), (9, 1));
    }

    #[test]
    fn models_are_set_by_the_first_override_and_by_switches() {
        let conversation = Conversation::new("k".into(), setup());
        let check = |fields: &str, model: &str| {
            conversation.prepare(&mut start(fields), Some(setup()));
            assert_eq!(conversation.info(true).model, model);
        };
        check(r#","model_override":{"model":"m2","provider":"p"}"#, "m2");
        check(r#","model_override":"m3""#, "m2");
        check(
            r#","pending_model_switch":{"raw":"m4 --provider custom"}"#,
            "m4",
        );
        check("", "m4");
    }
}

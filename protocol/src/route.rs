//! The mutator routes of SPEC §7: these thirteen are all.

use std::fmt;

/// When a route may run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RouteClass {
    /// Only by its own frame, never as a `control`.
    TurnPath,
    /// Also while a turn of the session runs.
    RunConcurrent,
    /// Only while no turn of the session runs, waits or is queued.
    IdleGated,
}

impl RouteClass {
    /// The name that the table prints.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::TurnPath => "turn-path",
            Self::RunConcurrent => "run-concurrent",
            Self::IdleGated => "idle-gated",
        }
    }
}

impl fmt::Display for RouteClass {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(self.name())
    }
}

/// Each route with its class, in the order of SPEC §7.
pub const ROUTES: [(&str, RouteClass); 13] = [
    ("prompt.submit", RouteClass::TurnPath),
    ("session.interrupt", RouteClass::TurnPath),
    ("reload.mcp", RouteClass::RunConcurrent),
    ("session.save", RouteClass::RunConcurrent),
    ("session.compress", RouteClass::IdleGated),
    ("prompt.submit.truncate", RouteClass::IdleGated),
    ("slash.model", RouteClass::IdleGated),
    ("slash.personality", RouteClass::IdleGated),
    ("slash.prompt", RouteClass::IdleGated),
    ("slash.compress", RouteClass::IdleGated),
    ("session.reset", RouteClass::IdleGated),
    ("session.history.reload", RouteClass::IdleGated),
    ("slash.retry", RouteClass::IdleGated),
];

/// The class of the route `name`, or `None` for an unclassified one.
#[must_use]
pub fn class_of(name: &str) -> Option<RouteClass> {
    ROUTES
        .iter()
        .find(|(route, _)| *route == name)
        .map(|(_, class)| *class)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_is_the_inventory() {
        let names: std::collections::HashSet<_> = ROUTES.iter().map(|(name, _)| name).collect();
        assert_eq!(names.len(), 13);
        assert_eq!(class_of("session.save"), Some(RouteClass::RunConcurrent));
        assert_eq!(class_of("slash.retry"), Some(RouteClass::IdleGated));
        assert_eq!(class_of("prompt.submit"), Some(RouteClass::TurnPath));
        assert_eq!(class_of("slash.refine"), None);
    }
}

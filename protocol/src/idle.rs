//! The idle proof of SPEC §13: idle is only what is proven.

use serde::Serialize;

/// What a ledger of work says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Work {
    /// Nothing is going on.
    None,
    /// Something is; the ledger and the entry, where they have a name.
    Some(Option<String>),
    /// It cannot be read.
    Unreadable,
}

/// Whether a host does nothing, and if not, why.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Verdict {
    /// `None` when it cannot be proven either way: treat as busy.
    pub idle: Option<bool>,
    /// Which ledger decided.
    pub reason: Option<&'static str>,
    /// The entry of the ledger; `Some(None)` where it has no name.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub detail: Option<Option<String>>,
}

/// The verdict over the two ledgers. `waiting_for_person` is the number of open requests without a
/// live turn, `None` where it cannot be read.
#[must_use]
pub fn idle_proof(work: Work, waiting_for_person: Option<usize>) -> Verdict {
    let verdict = |idle, reason, detail| Verdict {
        idle,
        reason,
        detail,
    };
    match (work, waiting_for_person) {
        (Work::Unreadable, _) => verdict(None, Some("turn_probe_unavailable"), None),
        (Work::Some(detail), _) => verdict(Some(false), Some("turn_in_flight"), Some(detail)),
        (Work::None, None) => verdict(None, Some("input_probe_unavailable"), None),
        (Work::None, Some(0)) => verdict(Some(true), None, None),
        (Work::None, Some(_)) => verdict(Some(false), Some("awaiting_human_input"), None),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn idle_is_only_what_is_proven() {
        let check = |work, waiting, expected: &str| {
            assert_eq!(
                serde_json::to_string(&idle_proof(work, waiting)).unwrap(),
                expected
            );
        };
        check(Work::None, Some(0), r#"{"idle":true,"reason":null}"#);
        check(
            Work::Some(None),
            Some(0),
            r#"{"idle":false,"reason":"turn_in_flight","detail":null}"#,
        );
        check(
            Work::Some(Some("session:abc".into())),
            None,
            r#"{"idle":false,"reason":"turn_in_flight","detail":"session:abc"}"#,
        );
        check(
            Work::None,
            Some(1),
            r#"{"idle":false,"reason":"awaiting_human_input"}"#,
        );
        check(
            Work::Unreadable,
            Some(1),
            r#"{"idle":null,"reason":"turn_probe_unavailable"}"#,
        );
        check(
            Work::None,
            None,
            r#"{"idle":null,"reason":"input_probe_unavailable"}"#,
        );
    }
}

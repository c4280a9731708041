//! The cases of JSONTestSuite: `fixtures/json-test-suite`.

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use serde::Deserialize;

/// One text that a JSON parser must take, must refuse, or may do either with.
#[derive(Debug)]
pub struct Case {
    /// Its name in the suite, which begins with `y_`, `n_` or `i_`.
    pub name: String,
    /// The text, which may be no UTF-8.
    pub bytes: Vec<u8>,
}

#[derive(Deserialize)]
struct Stored {
    name: String,
    base64: String,
    #[serde(default = "once")]
    times: usize,
    #[serde(default)]
    tail: String,
}

fn once() -> usize {
    1
}

/// All parsing cases of the suite.
///
/// # Panics
/// The fixture is not what its README says.
#[must_use]
pub fn parsing_cases() -> Vec<Case> {
    include_str!("../../fixtures/json-test-suite/parsing.jsonl")
        .lines()
        .map(|line| {
            let stored: Stored = serde_json::from_str(line).expect("a case as the README says");
            let decode = |text| BASE64_STANDARD.decode(text).expect("base64");
            let mut bytes = decode(stored.base64).repeat(stored.times);
            bytes.extend(decode(stored.tail));
            Case {
                name: stored.name,
                bytes,
            }
        })
        .collect()
}

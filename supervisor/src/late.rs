//! Controls whose waiter gave up, kept for their late answers.
//!
//! Pure: time is a number. Invariant: at most [`limits::LATE_ANSWERS`] are kept, each at most
//! [`limits::LATE_ANSWER_MS`]; each is taken at most once.

use std::collections::VecDeque;

use turnhost_protocol::limits;

use crate::core::{Nanos, from_ms};

/// What waits for late answers, oldest first.
pub(crate) struct LateAnswers<T> {
    waiting: VecDeque<(String, Nanos, T)>,
}

impl<T> Default for LateAnswers<T> {
    fn default() -> Self {
        Self {
            waiting: VecDeque::new(),
        }
    }
}

impl<T> LateAnswers<T> {
    /// Keeps `then` for the answer with this id; the oldest goes where there is no room.
    pub(crate) fn keep(&mut self, id: String, then: T, now: Nanos) {
        self.forget_old(now);
        if self.waiting.len() >= limits::LATE_ANSWERS {
            self.waiting.pop_front();
        }
        let until = now + from_ms(limits::LATE_ANSWER_MS);
        self.waiting.push_back((id, until, then));
    }

    /// Takes what was kept for the answer with this id.
    pub(crate) fn take(&mut self, id: &str, now: Nanos) -> Option<T> {
        self.forget_old(now);
        let at = self.waiting.iter().position(|(other, ..)| other == id)?;
        self.waiting.remove(at).map(|(_, _, then)| then)
    }

    fn forget_old(&mut self, now: Nanos) {
        while self
            .waiting
            .front()
            .is_some_and(|(_, until, _)| *until <= now)
        {
            self.waiting.pop_front();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_late_answer_is_taken_once_and_in_time() {
        let mut late = LateAnswers::default();
        late.keep("a".into(), 1, 0);
        late.keep("b".into(), 2, 1);
        assert_eq!(late.take("a", from_ms(1_799_999)), Some(1));
        assert_eq!(late.take("a", from_ms(1_799_999)), None);
        assert_eq!(late.take("b", from_ms(1_800_001)), None);
    }

    #[test]
    fn sixty_four_are_kept() {
        let mut late = LateAnswers::default();
        for number in 0..65 {
            late.keep(number.to_string(), number, 0);
        }
        assert_eq!(late.take("0", 1), None);
        assert_eq!(late.take("1", 1), Some(1));
        assert_eq!(late.take("64", 1), Some(64));
    }
}

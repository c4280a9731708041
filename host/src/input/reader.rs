//! The reader thread: lines in, one at a time, until the end of input.

use std::io::Read;

use turnhost_protocol::line::{Line, LineReader};

use super::Dispatcher;

/// Reads and dispatches until the end of input; answers why it ended, for the log.
pub fn read(source: impl Read, max_frame_bytes: usize, dispatcher: &Dispatcher) -> String {
    let mut lines = LineReader::new(source, max_frame_bytes);
    loop {
        if !lines.has_buffered_line() {
            // Nothing to do but to wait: let out what was answered so far.
            dispatcher.output().flush();
        }
        dispatcher.output().wait_for_room();
        match lines.next_line() {
            Ok(Some(Line::Whole(line) | Line::Cut(line))) => dispatcher.line(line),
            Ok(Some(Line::TooLong { head, bytes })) => dispatcher.too_long(head, bytes),
            Ok(None) => {
                dispatcher.output().flush();
                return "end of input".to_owned();
            }
            // A failed read is as final as the end: trying again could go on for ever.
            Err(error) => return format!("reading stdin failed: {error}"),
        }
    }
}

//! Lines out of bytes that come in pieces, exactly as they are.
//!
//! Unlike the reader of a host's input this one forgives nothing: an empty line, a carriage return
//! or a byte order mark is handed on, for the judge or the record. Pure; the caller bounds it.

/// Bytes that are not yet taken line by line.
#[derive(Debug, Default)]
pub(super) struct Lines {
    bytes: Vec<u8>,
    /// What stands before was taken.
    start: usize,
    /// No line feed stands between `start` and here.
    searched: usize,
}

impl Lines {
    pub(super) fn push(&mut self, bytes: &[u8]) {
        self.bytes.extend_from_slice(bytes);
    }

    /// The next whole line, without its line feed.
    pub(super) fn next_line(&mut self) -> Option<Vec<u8>> {
        let Some(found) = memchr::memchr(b'\n', &self.bytes[self.searched..]) else {
            // Once for many lines, so that moving the rest costs little.
            self.bytes.drain(..self.start);
            self.start = 0;
            self.searched = self.bytes.len();
            return None;
        };
        let end = self.searched + found;
        let line = self.bytes[self.start..end].to_vec();
        self.start = end + 1;
        self.searched = self.start;
        Some(line)
    }

    /// What follows the last whole line that was taken.
    pub(super) fn rest(&self) -> &[u8] {
        &self.bytes[self.start..]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_come_out_as_they_went_in() {
        let mut lines = Lines::default();
        let mut seen = Vec::new();
        for piece in ["a", "b\n\nc\r", "\nd", "", "e"] {
            lines.push(piece.as_bytes());
            while let Some(line) = lines.next_line() {
                seen.push(String::from_utf8(line).unwrap());
            }
        }
        assert_eq!(seen, ["ab", "", "c\r"]);
        assert_eq!(lines.rest(), b"de");
    }
}

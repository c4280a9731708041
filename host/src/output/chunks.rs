//! A queue of encoded lines in pieces that are handed to one write each.

use std::collections::VecDeque;

use turnhost_protocol::limits::WRITE_BYTES;

/// Lines in order, in chunks that end between two lines.
#[derive(Default)]
pub(super) struct Chunks {
    chunks: VecDeque<Chunk>,
    bytes: usize,
    urgent: usize,
}

struct Chunk {
    lines: Vec<u8>,
    urgent: bool,
}

impl Chunks {
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    pub fn is_empty(&self) -> bool {
        self.chunks.is_empty()
    }

    /// Whether it holds a line that goes before deltas.
    pub fn is_urgent(&self) -> bool {
        self.urgent > 0
    }

    /// Lets `write` append a line; answers its bytes.
    pub fn append(&mut self, urgent: bool, write: impl FnOnce(&mut Vec<u8>)) -> usize {
        let needs_chunk = self
            .chunks
            .back()
            .is_none_or(|last| last.lines.len() >= WRITE_BYTES);
        if needs_chunk {
            self.chunks.push_back(Chunk {
                lines: Vec::new(),
                urgent: false,
            });
        }
        let Some(last) = self.chunks.back_mut() else {
            return 0;
        };
        let before = last.lines.len();
        write(&mut last.lines);
        if urgent && !last.urgent {
            last.urgent = true;
            self.urgent += 1;
        }
        let added = last.lines.len() - before;
        self.bytes += added;
        added
    }

    /// The oldest chunk.
    pub fn pop(&mut self) -> Option<Vec<u8>> {
        let chunk = self.chunks.pop_front()?;
        self.bytes -= chunk.lines.len();
        self.urgent -= usize::from(chunk.urgent);
        Some(chunk.lines)
    }

    /// Puts back the rest of a chunk of which only a part was written.
    pub fn push_front(&mut self, lines: Vec<u8>) {
        self.bytes += lines.len();
        self.urgent += 1;
        self.chunks.push_front(Chunk {
            lines,
            urgent: true,
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_keep_order_count_and_urgency() {
        let mut chunks = Chunks::default();
        assert!(chunks.is_empty() && chunks.pop().is_none());
        chunks.append(false, |buffer| buffer.resize(WRITE_BYTES, b'a'));
        assert!(!chunks.is_urgent());
        assert_eq!(
            chunks.append(true, |buffer| buffer.extend_from_slice(b"bb\n")),
            3
        );
        assert!(chunks.is_urgent() && chunks.bytes() == WRITE_BYTES + 3);
        assert_eq!(chunks.pop().unwrap().len(), WRITE_BYTES);
        assert!(chunks.is_urgent());
        assert_eq!(chunks.pop().unwrap(), b"bb\n");
        chunks.push_front(b"rest\n".to_vec());
        assert!(chunks.is_urgent() && chunks.bytes() == 5);
        assert_eq!(chunks.pop().unwrap(), b"rest\n");
        assert!(!chunks.is_urgent() && chunks.bytes() == 0);
    }
}

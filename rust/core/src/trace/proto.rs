//! The few messages of Perfetto's trace format that a trace of operations needs, as protobuf.
//!
//! A trace is a sequence of packets, each a field of the one message around them. So two traces one after the other are a
//! trace. The numbers of fields are those of `trace_packet.proto`, `track_event.proto`, `track_descriptor.proto`,
//! `debug_annotation.proto` and `clock_snapshot.proto`.

/// Clocks, as Perfetto numbers them.
pub(super) const REALTIME: u64 = 1;
pub(super) const MONOTONIC: u64 = 3;
pub(super) const BOOTTIME: u64 = 6;

/// Kinds of events.
pub(super) const BEGIN: u64 = 1;
pub(super) const END: u64 = 2;
pub(super) const INSTANT: u64 = 3;

/// A message that is being written.
#[derive(Debug, Default)]
pub(super) struct Message(Vec<u8>);

impl Message {
    pub(super) fn bytes(&self) -> &[u8] {
        &self.0
    }

    pub(super) fn clear(&mut self) {
        self.0.clear();
    }

    /// Adds the fields of another message.
    pub(super) fn append(&mut self, other: &Self) {
        self.0.extend_from_slice(&other.0);
    }

    pub(super) fn number(&mut self, field: u64, value: u64) -> &mut Self {
        self.varint(field << 3);
        self.varint(value);
        self
    }

    pub(super) fn text(&mut self, field: u64, text: &str) -> &mut Self {
        self.varint(field << 3 | 2);
        self.varint(text.len() as u64);
        self.0.extend_from_slice(text.as_bytes());
        self
    }

    /// A message within this one.
    pub(super) fn nest(&mut self, field: u64, write: impl FnOnce(&mut Self)) -> &mut Self {
        self.varint(field << 3 | 2);
        let at = self.0.len();
        // Its length stands before it, mostly in one byte.
        self.0.push(0);
        write(self);
        let (digits, count) = digits((self.0.len() - at - 1) as u64);
        match count {
            1 => self.0[at] = digits[0],
            _ => drop(self.0.splice(at..=at, digits.into_iter().take(count))),
        }
        self
    }

    /// A packet of the trace at a time of the monotonic clock, of a writer with this number.
    pub(super) fn packet(&mut self, writer: u32, at: u64, write: impl FnOnce(&mut Self)) {
        self.nest(1, |packet| {
            packet.number(8, at).number(58, MONOTONIC);
            packet.number(10, u64::from(writer));
            write(packet);
        });
    }

    /// The readings of clocks at one time.
    pub(super) fn clocks(&mut self, readings: &[(u64, u64)]) -> &mut Self {
        self.nest(6, |snapshot| {
            for (clock, reading) in readings {
                snapshot.nest(1, |it| {
                    it.number(1, *clock).number(2, *reading);
                });
            }
        })
    }

    /// A process, whose tracks lie under `uuid`.
    pub(super) fn process(&mut self, uuid: u64, pid: u32, name: &str) -> &mut Self {
        self.nest(60, |track| {
            track.number(1, uuid).nest(3, |process| {
                process.number(1, u64::from(pid)).text(6, name);
            });
        })
    }

    /// A track under another one.
    pub(super) fn track(&mut self, uuid: u64, parent: u64, name: &str) -> &mut Self {
        self.nest(60, |track| {
            track.number(1, uuid).text(2, name).number(5, parent);
        })
    }

    /// An event on a track; `more` adds a name and annotations.
    pub(super) fn event(
        &mut self,
        kind: u64,
        track: u64,
        more: impl FnOnce(&mut Self),
    ) -> &mut Self {
        self.nest(11, |event| {
            event.number(9, kind).number(11, track);
            more(event);
        })
    }

    pub(super) fn name(&mut self, name: &str) -> &mut Self {
        self.text(23, name)
    }

    /// An annotation of an event, whose value `write` writes.
    pub(super) fn annotate(&mut self, name: &str, write: impl FnOnce(&mut Self)) -> &mut Self {
        self.nest(4, |annotation| {
            annotation.text(10, name);
            write(annotation);
        })
    }

    pub(super) fn annotate_number(&mut self, name: &str, value: u64) -> &mut Self {
        self.annotate(name, |it| {
            it.number(3, value);
        })
    }

    pub(super) fn annotate_signed(&mut self, name: &str, value: i64) -> &mut Self {
        self.annotate(name, |it| {
            it.number(4, value as u64);
        })
    }

    pub(super) fn annotate_text(&mut self, name: &str, value: &str) -> &mut Self {
        self.annotate(name, |it| {
            it.text(6, value);
        })
    }

    fn varint(&mut self, value: u64) {
        let (digits, count) = digits(value);
        self.0.extend_from_slice(&digits[..count]);
    }
}

/// A number in groups of seven bits, the lowest first, and how many there are.
fn digits(mut value: u64) -> ([u8; 10], usize) {
    let (mut digits, mut count) = ([0; 10], 0);
    loop {
        let is_last = value < 0x80;
        digits[count] = value as u8 & 0x7f | if is_last { 0 } else { 0x80 };
        (value, count) = (value >> 7, count + 1);
        if is_last {
            return (digits, count);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_texts_and_messages_are_protobuf() {
        let mut message = Message::default();
        message.number(1, 300).text(2, "ab").nest(3, |it| {
            it.number(1, 5).text(2, &"x".repeat(130));
        });
        let mut expected = vec![8, 0xac, 2, 18, 2, b'a', b'b', 26];
        // 2 bytes of the number, 1 of the field, 2 of the length and 130 of the text.
        expected.extend([0x87, 1, 8, 5, 18, 0x82, 1]);
        expected.extend([b'x'; 130]);
        assert_eq!(message.bytes(), expected);
    }

    #[test]
    fn a_negative_number_has_ten_bytes() {
        let mut message = Message::default();
        message.annotate_signed("o", -1);
        let mut expected = vec![34, 14, 82, 1, b'o', 32];
        expected.extend([0xff; 9]);
        expected.push(1);
        assert_eq!(message.bytes(), expected);
    }
}

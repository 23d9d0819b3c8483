//! Loans of private memory that the peer turns out not to reach: their payload is copied to where it does (`loans` says how
//! the two come to that).

use std::collections::VecDeque;

use super::{ShmLink, loans};
use crate::error::{Code, Error, Result};
use crate::heap::Window;

/// A loan that the peer could not read, where it can.
pub(super) struct Moved {
    number: u64,
    window: Window,
    /// The peer knows.
    is_told: bool,
}

impl Moved {
    /// A copy of loan `number`, whose pieces are among `lent`.
    fn copy(number: u64, lent: &VecDeque<(u64, (usize, usize))>) -> Result<Self> {
        let mut pieces = Vec::new();
        pieces.extend(lent.iter().filter(|(of, _)| *of == number));
        let bytes = pieces.iter().map(|(_, (_, bytes))| bytes).sum();
        if pieces.is_empty() {
            return Err(loans::readable(number));
        }
        tracing::info!(
            bytes,
            "the peer cannot read this process's memory: messages are copied from here on"
        );
        let mut window = Window::holding(bytes).ok_or_else(|| {
            let what = format_args!("make a copy of {bytes} bytes that the peer can read");
            Error::system(what, "the system refuses the memory")
        })?;
        let mut at = 0;
        for (_, (address, bytes)) in pieces {
            let start: *const u8 = std::ptr::with_exposed_provenance(address);
            // SAFETY: the lender leaves it as it is until the loan is back, which it is not.
            let piece = unsafe { std::slice::from_raw_parts(start, bytes) };
            window.write(at, bytes).copy_from_slice(piece);
            at += bytes;
        }
        Ok(Self {
            number,
            window,
            is_told: false,
        })
    }
}

impl ShmLink {
    /// Copies the payload of a loan, whose private memory the peer cannot read, to memory that it can read, and tells the peer
    /// when it has mapped that. To be called again until then.
    pub(super) fn move_loan(&mut self, number: u64) -> Result<()> {
        let is_it = |moved: &Moved| moved.number == number;
        if !self.moved.as_ref().is_some_and(is_it) {
            self.lender.give_up_private();
            self.moved = Some(Moved::copy(number, &self.lent)?);
        }
        let Some(moved) = self.moved.as_mut().filter(|moved| !moved.is_told) else {
            return Ok(());
        };
        match self.control.reaches(moved.window.segment()) {
            None => {}
            Some(true) => {
                moved.is_told = true;
                let segment = moved.window.segment();
                if self.lender.tell_moved(number, segment).wake {
                    self.control.ring_doorbell();
                }
            }
            Some(false) => {
                return Err(Error::new(
                    Code::System,
                    format!(
                        "the peer can neither read this process's memory nor map {} bytes of it: has it descriptors \
                         and addresses left?",
                        moved.window.bytes()
                    ),
                ));
            }
        }
        Ok(())
    }
}

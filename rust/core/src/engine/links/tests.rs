//! What fails on a link names its peer.

use std::os::fd::BorrowedFd;

use super::*;
use crate::transport::{ControlChannel, Page, Position};

/// A link on which everything fails that can.
struct Broken;

fn fault<T>() -> Result<T> {
    Err(Error::new(Code::Untrusted, "impossible words"))
}

impl Link for Broken {
    fn try_send(&mut self, _: &[u8]) -> Result<usize> {
        fault()
    }

    fn try_recv(&mut self, _: &mut [u8]) -> Result<usize> {
        fault()
    }

    fn try_fold(&mut self, _: usize, _: usize, _: &mut dyn FnMut(&[u8])) -> Result<usize> {
        fault()
    }

    fn try_post(&mut self, _: &[u8; MESSAGE_HEADER], _: &[u8]) -> Result<bool> {
        fault()
    }

    fn try_stream(&mut self, _: &[u8; MESSAGE_HEADER], _: &[u8]) -> Result<bool> {
        fault()
    }

    fn try_take(&mut self, _: &mut dyn FnMut(&[u8])) -> Result<bool> {
        fault()
    }

    fn is_streaming(&mut self) -> Result<bool> {
        fault()
    }

    fn peek(&mut self) -> Result<Option<[u8; MESSAGE_HEADER]>> {
        fault()
    }

    fn neighbour(&mut self) -> Option<&mut dyn Neighbour> {
        Some(self)
    }

    fn arm(&mut self, _: Interest) -> bool {
        false
    }

    fn disarm(&mut self) {}

    fn fds(&self) -> Vec<BorrowedFd<'_>> {
        Vec::new()
    }

    fn memory(&self) -> usize {
        0
    }

    fn describe(&self) -> String {
        "broken".to_owned()
    }
}

impl ControlChannel for Broken {
    fn peer_state(&mut self) -> PeerState {
        PeerState::Present
    }

    fn send_abort(&mut self, _: &Notice) {}

    fn send_farewell(&mut self) {}

    fn send_position(&mut self, _: &Position) {}

    fn take_position(&mut self) -> Option<Position> {
        None
    }
}

impl Neighbour for Broken {
    fn lends_from(&self) -> usize {
        1
    }

    fn most_lent_runs(&self) -> usize {
        1
    }

    fn lend_private_from(&mut self, _: usize) {}

    fn expect_a_crowd(&mut self) {}

    fn try_lend(
        &mut self,
        _: &[u8; MESSAGE_HEADER],
        _: &[(usize, usize)],
        _: Terms,
    ) -> Result<Lending> {
        fault()
    }

    fn loan(&mut self, _: Ticket) -> Result<Loan> {
        fault()
    }

    fn decline(&mut self) {}

    fn can_share(&mut self, _: Shareable<'_>) -> Option<bool> {
        None
    }

    fn try_share(&mut self, _: &[u8; MESSAGE_HEADER], _: Shareable<'_>) -> Result<Lending> {
        fault()
    }

    fn shared(&mut self) -> Result<Option<Shared>> {
        fault()
    }

    fn give_back(&mut self) {}

    fn await_writer(&mut self, _: Instant) {}

    fn wake(&mut self) {}

    fn page(&self) -> Page {
        unreachable!("no test asks for the page")
    }
}

#[test]
fn whatever_fails_on_a_link_names_its_peer() {
    let mut links = LinkTable::new(4);
    let name = "rank 3 (host node7, pid 4321)";
    links.establish(Lane::Collective, 3, Box::new(Broken), name.to_owned());
    let link = &mut links.open(Lane::Collective, 3).expect("a link").link;
    let header = [0; MESSAGE_HEADER];
    let ticket = Ticket {
        number: 1,
        proven: true,
    };
    let errors = [
        link.try_send(&[]).err(),
        link.try_send_message(&header, &[]).err(),
        link.try_recv(&mut []).err(),
        link.try_recv_by(&|_, _| (), &mut []).err(),
        link.try_fold(0, 1, &mut |_| ()).err(),
        link.try_post(&header, &[]).err(),
        link.try_stream(&header, &[]).err(),
        link.try_take(&mut |_| ()).err(),
        link.is_streaming().err(),
        link.peek().err(),
        link.try_lend(&header, &[], Terms::Loan).err(),
        link.try_share(&header, Shareable::Span((0, 0))).err(),
        link.shared().err(),
        link.loan(ticket).err(),
    ];
    for error in errors {
        let error = error.expect("an error");
        assert_eq!((error.code, error.peer), (Code::Untrusted, Some(3)));
        assert!(error.message.contains(name), "{error}");
        assert!(error.message.contains("impossible words"), "{error}");
    }
}

/// A rank may say of others whatever it likes, but not in another's name.
#[test]
fn who_tells_of_a_failure_is_named() {
    let teller = (3, "rank 3 (host, pid 4)");
    let notice = |culprit| Notice {
        code: Code::PeerLost,
        origin: 1,
        culprit,
        message: "rank 2 is gone".into(),
    };
    let error = as_told(&notice(Some(2)), 4, teller);
    assert_eq!((error.code, error.peer), (Code::PeerLost, Some(2)));
    assert_eq!(
        error.message,
        "rank 2 is gone (told by rank 3 (host, pid 4))"
    );
    let error = as_told(&notice(Some(4)), 4, teller);
    assert_eq!((error.code, error.peer), (Code::Untrusted, Some(3)));
    assert!(error.message.contains("blames rank 4"), "{error}");
}

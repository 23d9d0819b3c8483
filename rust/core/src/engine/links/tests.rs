//! Failures on a link name its peer.

use super::faulty::{At, Faulty};
use super::*;

#[test]
fn whatever_fails_on_a_link_names_its_peer() {
    let mut links = LinkTable::new(4);
    let name = "rank 3 (host node7, pid 4321)";
    let broken = Faulty {
        reach: |_: At| Err(Error::new(Code::Untrusted, "impossible words")),
        is_near: true,
    };
    links.establish(Lane::Collective, 3, Box::new(broken), name.to_owned());
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

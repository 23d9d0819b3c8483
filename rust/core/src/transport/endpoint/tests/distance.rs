//! How far other hosts are.

use std::io::Write;

use super::super::distance::some_of;
use super::*;
use crate::transport::handshake::HELLO_BYTES;

fn labelled(host: &str) -> Arc<Endpoint> {
    let options = EndpointOptions {
        host: Some(host.to_owned()),
        ..options()
    };
    Endpoint::start_with(&options, limits()).unwrap()
}

#[test]
fn the_kernels_tell_how_far_another_host_is() {
    let [here, there] = ["here", "there"].map(labelled);
    let beside = labelled("here");
    let far = here.farthest([beside.address(), there.address()].into_iter());
    let (far, target) = far.expect("it listens");
    assert!(far < Duration::from_millis(400), "{far:?}");
    assert!(there.address().tcp().contains(&target));
    assert_eq!(here.farthest([beside.address()].into_iter()), None);
    assert_eq!(here.farthest(std::iter::empty()), None);
}

#[test]
fn a_host_that_is_gone_has_no_distance() {
    let [here, there] = ["here", "there"].map(labelled);
    let address = there.address().clone();
    drop(there);
    let until = Instant::now() + Duration::from_secs(10);
    while TcpStream::connect(address.tcp()[0]).is_ok() {
        assert!(Instant::now() < until, "it still listens");
    }
    assert_eq!(here.farthest([&address].into_iter()), None);
}

#[test]
fn the_rate_to_another_host_is_measured_once() {
    let [there, other] = ["there", "other"].map(labelled);
    // On a busy machine no answer may come while it is measured.
    let measured = (0..50).find_map(|_| {
        let here = labelled("here");
        let rate = here.rate(there.address().tcp()[0])?;
        Some((here, rate))
    });
    let (here, rate) = measured.expect("it answers");
    assert!((1e6..1e12).contains(&rate), "{rate}");
    here.learn_rate(1.0);
    assert_eq!(here.rate(other.address().tcp()[0]), Some(rate));
    other.learn_rate(5e8);
    assert_eq!(other.rate(here.address().tcp()[0]), Some(5e8));
}

#[test]
fn who_does_not_answer_is_asked_once() {
    let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let target = silent.local_addr().unwrap();
    let here = labelled("here");
    assert_eq!(here.rate(target), None);
    drop(silent.accept().unwrap());
    silent.set_nonblocking(true).unwrap();
    assert_eq!(here.rate(target), None);
    silent.accept().unwrap_err();
    here.learn_rate(5e8);
    assert_eq!(here.rate(target), Some(5e8));
}

/// An endless stream is not read without end.
#[test]
fn what_is_thrown_away_has_an_end() {
    let there = labelled("there");
    let target = there.address().tcp()[0];
    let mut hello = vec![0; HELLO_BYTES];
    hello[..8].copy_from_slice(b"uni-rate");
    let flood = || {
        let mut stream = TcpStream::connect(target).unwrap();
        stream.write_all(&hello).unwrap();
        let block = vec![0; 1 << 20];
        let mut sent = 0;
        while stream.write_all(&block).is_ok() {
            sent += block.len();
        }
        sent
    };
    thread::scope(|scope| {
        let floods: Vec<_> = (0..3).map(|_| scope.spawn(flood)).collect();
        for flood in floods {
            // Beside what is read, the kernels at both ends hold some.
            assert!(flood.join().unwrap() < 128 << 20);
        }
    });
}

#[test]
fn of_many_hosts_some_are_asked() {
    for number in [0, 1, 8, 9, 20, 1000] {
        let asked = some_of((0..number).collect());
        assert!(asked.len() <= 8 && asked.first() == (number > 0).then_some(&0));
        assert!(asked.len() >= number.min(5), "{number}: {asked:?}");
        assert!(asked.is_sorted());
    }
}

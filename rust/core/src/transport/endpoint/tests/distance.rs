//! How far other hosts are.

use super::super::distance::some_of;
use super::*;

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
    let far = here.round_trip([beside.address(), there.address()].into_iter());
    let far = far.expect("it listens");
    assert!(far < Duration::from_millis(100), "{far:?}");
    assert_eq!(here.round_trip([beside.address()].into_iter()), None);
    assert_eq!(here.round_trip(std::iter::empty()), None);
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
    assert_eq!(here.round_trip([&address].into_iter()), None);
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

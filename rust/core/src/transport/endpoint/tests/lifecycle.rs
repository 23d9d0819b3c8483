//! Endpoints and groups that begin and end.

use super::*;

#[test]
fn registering_is_checked() {
    let (zero, _one) = pair();
    let gate = || Arrivals::new(Verdict::Accept).0;
    let twice = zero.endpoint.register(zero.keys[0].clone(), 0, 4, gate());
    assert_eq!(twice.unwrap_err().code, Code::InvalidArgument);
    let key = group().remove(3);
    let outside = zero.endpoint.register(key, 4, 4, gate());
    assert_eq!(outside.unwrap_err().code, Code::InvalidArgument);
}

#[test]
fn starting_with_an_unknown_interface_is_refused() {
    let options = EndpointOptions {
        interface: Some("nosuch0".into()),
        ..EndpointOptions::default()
    };
    let error = Endpoint::start(options).err().unwrap();
    assert_eq!(error.code, Code::InvalidArgument);
    assert!(
        error.message.contains("nosuch0") && error.message.contains("lo"),
        "{error}"
    );
}

#[test]
fn dropping_ends_the_accepting_thread_promptly() {
    let keys = group();
    let member = Member::new(&keys, 0);
    let silent: Vec<TcpStream> = (0..3).map(|_| tcp_to(&member)).collect();
    let since = Instant::now();
    drop(member);
    assert!(
        since.elapsed() < Duration::from_secs(2),
        "took {:?}",
        since.elapsed()
    );
    silent.into_iter().for_each(strangers::assert_shown_out);
}

#[test]
fn the_global_endpoint_is_shared_while_held() {
    let options = EndpointOptions {
        host: Some("global-test".into()),
        ..options()
    };
    let first = Endpoint::global(&options).unwrap();
    let second = Endpoint::global(&options).unwrap();
    assert_eq!(first.address(), second.address());
    let published = first.address().to_bytes();
    drop((first, second));
    let third = Endpoint::global(&options).unwrap();
    assert_ne!(third.address().to_bytes(), published);
}

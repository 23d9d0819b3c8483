//! The collectives and messages as futures, for programs that are `async`: the feature `async`.
//!
//! A future may be dropped before its operation has ended, and other ranks still read and write the memory then. So an
//! operation owns its vectors, and the future gives back the one with the result. It is under way from the call on, whether
//! its future is polled or not; a thread of the library drives it, and any executor may wait for it.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use crate::buffer::{Element, Memory};
use crate::communicator::{Communicator, Work};
use crate::engine::{Completion, PointToPoint, Request, Sizes};
use crate::error::Result;
use crate::locks::Mutex;
use crate::types::{Rank, ReduceOp};

/// An operation under way, which becomes what it returns. Dropping it does not end the operation.
///
/// # Errors
/// `InvalidArgument` or `Unsupported` before anything is sent, else what ended the operation. The vectors are dropped then.
#[must_use = "the operation is under way, and its result would be lost"]
#[derive(Debug)]
pub struct Pending<T>(Arc<Mutex<State<T>>>);

#[derive(Debug)]
enum State<T> {
    UnderWay(Option<Waker>),
    Ended(Option<Result<T>>),
}

impl<T> Future for Pending<T> {
    type Output = Result<T>;

    /// # Panics
    /// When it is polled after its end.
    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        match &mut *self.0.lock() {
            State::UnderWay(waker) => {
                *waker = Some(context.waker().clone());
                Poll::Pending
            }
            State::Ended(result) => Poll::Ready(result.take().expect("polled after its end")),
        }
    }
}

impl<T: Send + 'static> Pending<T> {
    /// Has `start` begin an operation, whose memory `owner` owns or keeps; `output` takes the result out of it.
    fn begin<O: Send + 'static>(
        owner: O,
        output: impl FnOnce(O) -> T + Send + 'static,
        start: impl FnOnce(Completion) -> Result<Work>,
    ) -> Self {
        let state = Arc::new(Mutex::new(State::UnderWay(None)));
        let end = {
            let state = Arc::clone(&state);
            move |result: Result<T>| {
                let before = std::mem::replace(&mut *state.lock(), State::Ended(Some(result)));
                if let State::UnderWay(Some(waker)) = before {
                    waker.wake();
                }
            }
        };
        let refused = end.clone();
        let completion: Completion = Box::new(move |result| end(result.map(|()| output(owner))));
        if let Err(error) = start(completion) {
            refused(Err(error));
        }
        Self(state)
    }
}

/// The operations as futures, each named after the one that blocks.
impl Communicator {
    /// Every rank's `data`, reduced.
    pub fn all_reduce_async<T: Element>(&self, mut data: Vec<T>, op: ReduceOp) -> Pending<Vec<T>> {
        // SAFETY: the vector is kept until the operation has ended, and nothing else uses its elements.
        let memory = unsafe { Memory::of_mut(&mut data) };
        let request = Request::all_reduce(T::DTYPE, op, None, memory);
        self.pending(data, std::convert::identity, request)
    }

    /// On the root every rank's `data`, reduced; elsewhere `data` as it was.
    pub fn reduce_async<T: Element>(
        &self,
        mut data: Vec<T>,
        op: ReduceOp,
        root: Rank,
    ) -> Pending<Vec<T>> {
        // SAFETY: as in `all_reduce_async`.
        let memory = unsafe { Memory::of_mut(&mut data) };
        let (input, output) = match self.rank() == root {
            true => (None, Some(memory)),
            false => (Some(memory), None),
        };
        let request = Request::reduce(T::DTYPE, op, root, input, output);
        self.pending(data, std::convert::identity, request)
    }

    /// The `data` of the ranks up to this one, reduced, as in [`Request::scan`].
    pub fn scan_async<T: Element>(&self, mut data: Vec<T>, op: ReduceOp) -> Pending<Vec<T>> {
        // SAFETY: as in `all_reduce_async`.
        let memory = unsafe { Memory::of_mut(&mut data) };
        let request = Request::scan(T::DTYPE, op, None, memory);
        self.pending(data, std::convert::identity, request)
    }

    /// The `data` of the ranks before this one, reduced, as in [`Request::exscan`]; on rank 0 `data` as it was.
    pub fn exscan_async<T: Element>(&self, mut data: Vec<T>, op: ReduceOp) -> Pending<Vec<T>> {
        // SAFETY: as in `all_reduce_async`.
        let memory = unsafe { Memory::of_mut(&mut data) };
        let request = Request::exscan(T::DTYPE, op, None, Some(memory));
        self.pending(data, std::convert::identity, request)
    }

    /// The root's `data`; the others give a vector of the same length.
    pub fn broadcast_async<T: Element>(&self, mut data: Vec<T>, root: Rank) -> Pending<Vec<T>> {
        // SAFETY: as in `all_reduce_async`.
        let memory = unsafe { Memory::of_mut(&mut data) };
        let request = Request::broadcast(T::DTYPE, root, memory);
        self.pending(data, std::convert::identity, request)
    }

    /// Every rank's `input` in rank order.
    pub fn all_gather_async<T: Element + Default>(&self, input: Vec<T>) -> Pending<Vec<T>> {
        let sizes = Sizes::Even(input.len());
        let output = vec![T::default(); input.len() * self.world_size()];
        self.pending_pair(input, output, |input, output| {
            Request::all_gather(T::DTYPE, Some(input), output, sizes)
        })
    }

    /// This rank's block of every rank's `input`, reduced. `input` has one block for each rank.
    pub fn reduce_scatter_async<T: Element + Default>(
        &self,
        input: Vec<T>,
        op: ReduceOp,
    ) -> Pending<Vec<T>> {
        let block = input.len() / self.world_size();
        self.pending_pair(input, vec![T::default(); block], |input, output| {
            Request::reduce_scatter(T::DTYPE, op, input, output, Sizes::Even(block))
        })
    }

    /// The blocks of all ranks for this one, in rank order. Block r of `input` is for rank r.
    pub fn all_to_all_async<T: Element + Default>(&self, input: Vec<T>) -> Pending<Vec<T>> {
        let sizes = Sizes::Even(input.len() / self.world_size());
        let output = vec![T::default(); input.len()];
        self.pending_pair(input, output, |input, output| {
            Request::all_to_all(T::DTYPE, input, output, sizes)
        })
    }

    /// Ready when every rank has come.
    pub fn barrier_async(&self) -> Pending<()> {
        self.pending((), std::convert::identity, Request::barrier())
    }

    /// Sends `data` to rank `to`, and gives it back when it may be changed again.
    pub fn send_async<T: Element>(&self, mut data: Vec<T>, to: Rank, tag: u64) -> Pending<Vec<T>> {
        // SAFETY: as in `all_reduce_async`.
        let memory = unsafe { Memory::of_mut(&mut data) };
        Pending::begin(data, std::convert::identity, |completion| {
            let options = of_message(completion);
            // SAFETY: the completion owns the vector until the operation has ended.
            unsafe { self.send(T::DTYPE, memory, to, tag, options) }
        })
    }

    /// A message of exactly `count` elements from rank `from`, or from any rank (`None`).
    pub fn receive_async<T: Element + Default>(
        &self,
        count: usize,
        from: Option<Rank>,
        tag: u64,
    ) -> Pending<Vec<T>> {
        let mut data = vec![T::default(); count];
        // SAFETY: as in `all_reduce_async`.
        let memory = unsafe { Memory::of_mut(&mut data) };
        Pending::begin(data, std::convert::identity, |completion| {
            let options = of_message(completion);
            // SAFETY: the completion owns the vector until the operation has ended.
            unsafe { self.receive(T::DTYPE, memory, from, tag, options) }
        })
    }

    /// A request on memory that `owner` owns.
    fn pending<O: Send + 'static, T: Send + 'static>(
        &self,
        owner: O,
        output: impl FnOnce(O) -> T + Send + 'static,
        request: Request,
    ) -> Pending<T> {
        Pending::begin(owner, output, |completion| {
            // SAFETY: the completion owns the memory until the operation has ended.
            unsafe { self.start(request, Some(completion)) }
        })
    }

    fn pending_pair<T: Element>(
        &self,
        mut input: Vec<T>,
        mut output: Vec<T>,
        request: impl FnOnce(Memory, Memory) -> Request,
    ) -> Pending<Vec<T>> {
        // SAFETY: as in `all_reduce_async`.
        let request = unsafe { request(Memory::of_mut(&mut input), Memory::of_mut(&mut output)) };
        self.pending((input, output), |(_, output)| output, request)
    }
}

fn of_message(completion: Completion) -> PointToPoint {
    PointToPoint {
        completion: Some(completion),
        ..PointToPoint::default()
    }
}

#[cfg(test)]
mod tests {
    use std::task::Wake;
    use std::thread::Thread;

    use super::*;
    use crate::config::Config;
    use crate::error::Code;

    struct Unpark(Thread);

    impl Wake for Unpark {
        fn wake(self: Arc<Self>) {
            self.0.unpark();
        }
    }

    /// The smallest executor.
    fn block_on<F: Future>(future: F) -> F::Output {
        let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
        let mut context = Context::from_waker(&waker);
        let mut future = std::pin::pin!(future);
        loop {
            match future.as_mut().poll(&mut context) {
                Poll::Ready(output) => return output,
                Poll::Pending => std::thread::park(),
            }
        }
    }

    /// Runs `body` on every rank, each in a thread.
    fn on_ranks(world: usize, body: impl Fn(Communicator) + Sync) {
        std::thread::scope(|scope| {
            for comm in Communicator::local(world, &Config::default()).unwrap() {
                scope.spawn(|| body(comm));
            }
        });
    }

    #[test]
    fn operations_become_their_results() {
        on_ranks(3, |comm| {
            block_on(async {
                let rank = comm.rank() as i64;
                let sum = comm.all_reduce_async(vec![rank; 1000], ReduceOp::Sum);
                // Several are under way at once, whichever is waited for first.
                let all = comm.all_gather_async(vec![rank, 10 * rank]);
                assert_eq!(all.await.unwrap(), [0, 0, 1, 10, 2, 20]);
                assert_eq!(sum.await.unwrap(), [3; 1000]);
                let mine = comm.reduce_scatter_async(vec![rank, rank + 1, rank + 2], ReduceOp::Sum);
                assert_eq!(mine.await.unwrap(), [3 + 3 * rank]);
                let swapped = comm.all_to_all_async(vec![10 * rank, 10 * rank + 1, 10 * rank + 2]);
                assert_eq!(swapped.await.unwrap(), [rank, 10 + rank, 20 + rank]);
                let scan = comm.scan_async(vec![1 + rank], ReduceOp::Sum);
                let exscan = comm.exscan_async(vec![1 + rank], ReduceOp::Sum);
                assert_eq!(scan.await.unwrap(), [(1 + rank) * (2 + rank) / 2]);
                assert_eq!(exscan.await.unwrap(), [if rank == 2 { 3 } else { 1 }]);
                assert_eq!(comm.broadcast_async(vec![rank], 2).await.unwrap(), [2]);
                let reduced = comm
                    .reduce_async(vec![rank], ReduceOp::Max, 1)
                    .await
                    .unwrap();
                assert_eq!(reduced, [if rank == 1 { 2 } else { rank }]);
                comm.barrier_async().await.unwrap();
            });
        });
    }

    #[test]
    fn messages_are_futures_too() {
        on_ranks(2, |comm| {
            let peer = 1 - comm.rank();
            block_on(async {
                let received = comm.receive_async::<f32>(70_000, Some(peer), 5);
                let sent = comm.send_async(vec![peer as f32; 70_000], peer, 5);
                assert_eq!(received.await.unwrap(), vec![comm.rank() as f32; 70_000]);
                sent.await.unwrap();
            });
        });
    }

    #[test]
    fn an_operation_goes_on_without_its_future() {
        on_ranks(2, |comm| {
            drop(comm.all_reduce_async(vec![1_i32; 100_000], ReduceOp::Sum));
            assert_eq!(
                block_on(comm.all_reduce_async(vec![2_i32], ReduceOp::Sum)).unwrap(),
                [4]
            );
        });
    }

    #[test]
    fn a_refused_operation_is_ready_with_its_error() {
        on_ranks(1, |comm| {
            let error = block_on(comm.broadcast_async(vec![0_u8; 3], 7)).unwrap_err();
            assert_eq!(error.code, Code::InvalidArgument);
        });
    }
}

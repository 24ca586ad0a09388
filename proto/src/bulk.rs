//! The codec of the bulk service: prost, with buffers that fit KV frames.

use std::marker::PhantomData;

use prost::Message;
use tonic::codec::{BufferSettings, Codec};
use tonic_prost::{ProstCodec, ProstDecoder, ProstEncoder};

/// Bytes of the buffer that a bulk stream encodes into and decodes from: a few frames, so that it stays in a core's
/// second-level cache. The default of 8 KiB would be grown, and so copied, for every frame.
pub const BULK_BUFFER_BYTES: usize = 512 * 1024;

/// Buffered bytes from which on the encoder hands them to HTTP/2; a frame is handed over as it stands.
pub const BULK_YIELD_BYTES: usize = 64 * 1024;

/// Buffer settings of both directions.
pub fn bulk_buffer_settings() -> BufferSettings {
    BufferSettings::new(BULK_BUFFER_BYTES, BULK_YIELD_BYTES)
}

/// Prost messages over buffers sized for bulk.
#[derive(Debug)]
pub struct BulkCodec<T, U> {
    messages: PhantomData<(T, U)>,
}

impl<T, U> Default for BulkCodec<T, U> {
    fn default() -> Self {
        Self { messages: PhantomData }
    }
}

impl<T, U> Codec for BulkCodec<T, U>
where
    T: Message + Send + 'static,
    U: Message + Default + Send + 'static,
{
    type Encode = T;
    type Decode = U;
    type Encoder = ProstEncoder<T>;
    type Decoder = ProstDecoder<U>;

    fn encoder(&mut self) -> Self::Encoder {
        ProstCodec::<T, U>::raw_encoder(bulk_buffer_settings())
    }

    fn decoder(&mut self) -> Self::Decoder {
        ProstCodec::<T, U>::raw_decoder(bulk_buffer_settings())
    }
}

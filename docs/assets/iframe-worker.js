// The search of the site runs in a worker, which browsers refuse to pages that are opened as files.
// Such pages get this stand-in: a hidden frame that runs the worker's script. The theme knows it by the
// second name.
if (location.protocol === "file:") {
  window.Worker = window.IFrameWorker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.body.append(frame)
      this.inner = frame.contentWindow
      const own = new URL(url, location.href)
      const load = (source) => new Promise((done, failed) => {
        const script = this.inner.document.createElement("script")
        Object.assign(script, { src: new URL(source, own), onload: done, onerror: failed })
        this.inner.document.body.append(script)
      })
      this.inner.postMessage = (data) =>
        this.dispatchEvent(new MessageEvent("message", { data }))
      this.inner.importScripts = (...sources) =>
        sources.reduce((before, source) => before.then(() => load(source)), Promise.resolve())
      this.ready = load(own)
    }

    postMessage(data) {
      this.ready.then(() =>
        this.inner.dispatchEvent(new this.inner.MessageEvent("message", { data })))
    }
  }
}
